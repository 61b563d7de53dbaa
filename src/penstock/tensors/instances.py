"""Instances of a model: threads with a session each, that execute batches and hand back what came of them.

ONNX Runtime lets other threads run while it computes. A batch that fails is executed again, its requests one by one, so
that one with bad values fails alone.

A batch that takes less than a thread takes to wake up is executed on the spot, in the event loop: then no two threads
wait for each other's turn of the interpreter.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from time import perf_counter
from typing import NamedTuple

import numpy as np

from penstock.core.errors import EngineFailed, PenstockError
from penstock.tensors.datatypes import Array
from penstock.tensors.onnx_model import Session
from penstock.tensors.statistics import BatchTimes

log = logging.getLogger("penstock.tensors")

QUICK_S = 400e-6  # that a batch takes at most which is executed on the spot
MAX_SLOW = 16  # in a row that took longer: other work of the machine has its share in what is measured

Tensors = Mapping[str, Array]
Outcome = dict[str, Array] | PenstockError


class Part(NamedTuple):
    """One request of a batch."""

    inputs: Tensors
    size: int  # rows
    outputs: Sequence[str]  # that are wanted


class Execution(NamedTuple):
    """Results of a batch: an outcome for each of its requests, in their order."""

    outcomes: list[Outcome]
    times: BatchTimes
    num_runs: int  # more than one where the batch failed


Done = Callable[[Execution], None]  # called in the instance's thread


class Instance:
    def __init__(self, name: str, session: Session, *, is_batched: bool, is_quick: bool = False) -> None:
        """`is_batched`: the first dimension of each tensor is the batch's. `is_quick`: its largest batch is executed
        within a moment; if that turns out to be wrong it goes to the thread."""
        self.device = session.device
        self.is_quick = is_quick
        self._num_slow = 0
        self._session = session
        self._is_batched = is_batched
        self._work: SimpleQueue[tuple[Sequence[Part], Done] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def execute(self, parts: Sequence[Part], done: Done) -> None:
        self._work.put((parts, done))

    def execute_here(self, parts: Sequence[Part]) -> Execution:
        found = execute(self._session, parts, is_batched=self._is_batched)
        self._num_slow = self._num_slow + 1 if found.times.infer_s > QUICK_S else 0
        self.is_quick = self._num_slow < MAX_SLOW
        return found

    def stop(self) -> None:
        """The thread ends once it has nothing more to do. It is not waited for: it may be deep in a product."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            parts, done = work
            done(execute(self._session, parts, is_batched=self._is_batched))
            del work, parts, done  # or the last request would be kept until the next one comes


def execute(session: Session, parts: Sequence[Part], *, is_batched: bool) -> Execution:
    began_s = perf_counter()
    try:
        found, times = _together(session, parts, is_batched=is_batched)
        return Execution([*found], times, 1)
    except Exception as error:
        if len(parts) == 1:
            times = BatchTimes(0.0, perf_counter() - began_s, 0.0)
            return Execution([_told(error)], times, 1)
    alone = [execute(session, [part], is_batched=is_batched) for part in parts]
    times = BatchTimes(0.0, perf_counter() - began_s, 0.0)
    return Execution([one.outcomes[0] for one in alone], times, 1 + len(alone))


def _together(
    session: Session, parts: Sequence[Part], *, is_batched: bool
) -> tuple[list[dict[str, Array]], BatchTimes]:
    began_s = perf_counter()
    wanted = list(dict.fromkeys(name for part in parts for name in part.outputs))
    first = parts[0].inputs
    inputs = first if len(parts) == 1 else {name: np.concatenate([one.inputs[name] for one in parts]) for name in first}
    put_s = perf_counter()
    outputs = dict(zip(wanted, session.run(inputs, wanted), strict=True))
    run_s = perf_counter()
    found = _apart(outputs, parts) if is_batched else [outputs]
    return found, BatchTimes(put_s - began_s, run_s - put_s, perf_counter() - run_s)


def _apart(outputs: Tensors, parts: Sequence[Part]) -> list[dict[str, Array]]:
    total = sum(part.size for part in parts)
    for name, array in outputs.items():
        if array.ndim == 0 or array.shape[0] != total:
            raise EngineFailed(
                f"the output '{name}' has the shape {list(array.shape)} for a batch of {total}: this model has no "
                "batch dimension (max_batch_size: 0)"
            )
    found, at = [], 0
    for part in parts:
        found.append({name: outputs[name][at : at + part.size] for name in part.outputs})
        at += part.size
    return found


def _told(error: Exception) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    log.error("a batch failed", exc_info=error)
    return EngineFailed("the model failed on this request")
