"""Texts through the batcher: those of a request go in as batches of one padded length each, which others may join."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from penstock.api.openai.embeddings import Vectors
from penstock.core.errors import PenstockError
from penstock.server.text_limits import TextLimits
from penstock.server.text_models import Computed, Job, Relevance, Task
from penstock.tensors.served_model import Inference, ServedVersion
from penstock.tensors.text_reader import TextReader

_INLINE_BYTES = 1 << 20  # of an output, that is read on the spot


class _Rows(NamedTuple):
    length: int  # to which they are padded
    numbers: list[int]  # of the texts


class VersionTexts:
    """The `TextModel` of a version."""

    def __init__(self, version: ServedVersion, reader: TextReader) -> None:
        self._version = version
        self._reader = reader
        self._num_waiting = 0

    @property
    def name(self) -> str:
        return self._version.name

    @property
    def tasks(self) -> Sequence[Task]:
        return self._reader.tasks

    @property
    def limits(self) -> TextLimits:
        return self._reader.limits

    @property
    def dimensions(self) -> int:
        return self._reader.dimensions

    @property
    def relevance(self) -> Relevance:
        return self._reader.relevance

    @property
    def labels(self) -> Sequence[str]:
        return self._reader.labels

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    async def compute(self, request_id: str, job: Job) -> Computed:
        """Raises the first error of its batches, and gives up the others."""
        self._num_waiting += len(job.texts)
        # A large request leaves room in the queue for others.
        places = asyncio.Semaphore(2 + 2 * len(self._version.instances))
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._run(rows, job, places)) for rows in self._batches(job)]
        except* PenstockError as errors:
            raise _first(errors) from None
        finally:
            self._num_waiting -= len(job.texts)
        found = [task.result() for task in tasks]
        order = np.argsort([number for numbers, _, _ in found for number in numbers], kind="stable")
        values = np.concatenate([values for _, values, _ in found])[order]
        return Computed(values, sum(device_s for _, _, device_s in found))

    def _batches(self, job: Job) -> Iterator[_Rows]:
        by_length: dict[int, list[int]] = {}
        for number, text in enumerate(job.texts):
            by_length.setdefault(self._reader.padded_length(len(text)), []).append(number)
        most = max(1, self._version.signature.max_batch_size)
        for length, numbers in sorted(by_length.items()):
            for at in range(0, len(numbers), most):
                yield _Rows(length, numbers[at : at + most])

    async def _run(self, rows: _Rows, job: Job, places: asyncio.Semaphore) -> tuple[list[int], Vectors, float]:
        reader, texts = self._reader, [job.texts[number] for number in rows.numbers]
        types = None if job.types is None else [job.types[number] for number in rows.numbers]
        async with places:
            inputs = reader.inputs(texts, types, rows.length)
            outputs, device_s = await self._version.compute(Inference(inputs, (reader.output,)))
        output, lengths = outputs[reader.output], [len(text) for text in texts]
        if output.nbytes <= _INLINE_BYTES:
            values = reader.values(output, lengths, is_raw=job.is_raw)
        else:
            values = await asyncio.to_thread(reader.values, output, lengths, is_raw=job.is_raw)
        return rows.numbers, values, device_s


def _first(errors: BaseExceptionGroup[PenstockError]) -> PenstockError:
    found = errors.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found
