"""Adapters and texts on all ranks of a model, held to one rank; on CPUs by `test_on_all_ranks`, on GPUs by `on_gpu`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.core.request import AdapterRef, Request
from penstock.core.sampling import SamplingParams
from penstock.core.token_logprobs import read_rows
from penstock.hub.peft import read_peft
from penstock.model.random_weights import RandomCheckpoint
from penstock.runner.assemble import Assembly
from tests.model.family_configs import SHAPE
from tests.model.lora import EVERY_LINEAR, merged, write_adapter
from tests.model.tiny import ArrayCheckpoint
from tests.runner.clients import Clients, one_after_the_other, serve
from tests.runner.judge import Judge

TEXTS = [np.random.default_rng(5).integers(0, SHAPE.vocab_size, length).tolist() for length in (7, 1, 20, 16)]
SCORED = [3, 1, 10, 15]


def asked(count: int, adapters: list[AdapterRef | None]) -> list[Request]:
    dice = np.random.default_rng(3)
    return [
        Request(
            f"r{number}",
            dice.integers(0, SHAPE.vocab_size, int(dice.integers(1, 20))).tolist(),
            8,
            SamplingParams(temperature=0.0),
            adapter=adapters[number % len(adapters)],
        )
        for number in range(count)
    ]


@dataclass
class Adapted:
    """A model's adapters on disk, and the judge of each one's answers."""

    judges: dict[AdapterRef | None, Judge]
    paths: dict[AdapterRef, Path]


def make_adapters(directory: Path) -> Adapted:
    random_weights = RandomCheckpoint(SHAPE)
    tensors = {name: random_weights.tensor(name) for name in random_weights.tensor_names()}
    made = Adapted({None: Judge(random_weights, longest=64)}, {})
    for seed in (1, 2):
        path = write_adapter(directory / str(seed), SHAPE, rank=3, targets=EVERY_LINEAR, seed=seed)
        found = read_peft(path)
        ref = AdapterRef(found.digest, path.name)
        made.judges[ref] = Judge(ArrayCheckpoint(SHAPE, merged(tensors, found)), longest=64)
        made.paths[ref] = path
    return made


def read_and_keep(assembly: Assembly, path: Path) -> None:
    assert assembly.adapters is not None
    assembly.adapters.keep(assembly.adapters.read(str(path), read_peft(path).digest))


def answer_with(assembly: Assembly, adapted: Adapted) -> None:
    """Requests with each adapter and with none, and every token held to the reference."""
    clients = Clients(one_after_the_other(asked(9, list(adapted.judges)), apart=1))
    serve(assembly, clients, num_blocks=64)
    assert len(clients.finished) == 9
    for answer in clients.finished.values():
        adapted.judges[answer.request.adapter].check(answer)


def take_turns(assembly: Assembly, adapted: Adapted) -> None:
    """Two adapters and one place: it changes hands while others decode. Both leave host memory, and come back."""
    assert assembly.adapters is not None
    for _ in range(2):
        for path in adapted.paths.values():
            read_and_keep(assembly, path)
        answer_with(assembly, adapted)
        assembly.adapters.clear(0)
        for ref in adapted.paths:
            assembly.adapters.forget(ref.digest)


def same_vectors_and_scores(ours: Assembly, theirs: Assembly) -> None:
    """Checks that both answer the same, also for a text that is longer than a step."""
    assert ours.embedder is not None
    assert theirs.embedder is not None
    assert ours.embedder.most_tokens < max(map(len, TEXTS))
    for one, other in zip(ours.embedder.embed(TEXTS), theirs.embedder.embed(TEXTS), strict=True):
        np.testing.assert_allclose(np.frombuffer(one, np.float32), np.frombuffer(other, np.float32), atol=2e-5)
    np.testing.assert_allclose(ours.embedder.score(TEXTS, SCORED), theirs.embedder.score(TEXTS, SCORED), atol=2e-4)
    own, other = (
        read_rows(b"".join(one.embedder.token_logprobs(TEXTS, 2)), list(map(len, TEXTS)), 2) for one in (ours, theirs)
    )
    for some, others in zip(own, other, strict=True):
        np.testing.assert_allclose([one.logprob for one in some], [one.logprob for one in others], atol=2e-4)
