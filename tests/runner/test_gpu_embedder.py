"""A GPU's vectors and scores are the CPU's, and nobody who generates beside them notices."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from penstock.engine.embedding import EmbedQueue
from penstock.engine.engine import Engine
from penstock.engine.loop import EngineLoop
from penstock.engine.messages import Embed, Embedded, FromEngine, Submit, ToEngine
from penstock.kv.cache import KVCache
from penstock.model.random_weights import RandomCheckpoint
from penstock.runner.embedder import DecoderEmbedder
from penstock.sched.budget import StepBudget
from penstock.sched.scheduler import Scheduler
from tests.devices import NEEDS_GPU
from tests.runner.clients import Clients, Script, TickingClock
from tests.runner.devices import assembled
from tests.runner.judge import Judge
from tests.runner.test_cuda_runner import CONFIG, workload

TEXTS = [np.random.default_rng(5).integers(0, 500, length).tolist() for length in (7, 1, 33, 400, 1, 16, 96)]
SCORED = [3, 300, 15, 95]
SHORT = [TEXTS[i] for i in (0, 1, 2, 5)]


def embedders() -> tuple[DecoderEmbedder, DecoderEmbedder]:
    on_gpu, on_cpu = (assembled(CONFIG, device, block_size=16).embedder for device in ("cuda", "cpu"))
    assert on_gpu is not None
    assert on_cpu is not None
    return on_gpu, on_cpu


def vectors(rows: list[bytes]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.frombuffer(b"".join(rows), np.float32)


@NEEDS_GPU
def test_vectors_and_scores_are_the_cpus() -> None:
    """One of the texts is four times as long as a step."""
    on_gpu, on_cpu = embedders()
    assert on_gpu.most_tokens == 96
    np.testing.assert_allclose(vectors(on_gpu.embed(TEXTS)), vectors(on_cpu.embed(TEXTS)), atol=2e-5)
    texts = [TEXTS[i] for i in (0, 3, 5, 6)]
    np.testing.assert_allclose(on_gpu.score(texts, SCORED), on_cpu.score(texts, SCORED), atol=2e-4)


@NEEDS_GPU
def test_a_text_that_needs_more_blocks_than_there_are_gets_them_for_once() -> None:
    on_gpu, on_cpu = embedders()
    long = [TEXTS[3] + TEXTS[6]]
    assert -(-len(long[0]) // 16) > on_gpu._most_blocks
    expected = on_gpu.embed(TEXTS)
    np.testing.assert_allclose(vectors(on_gpu.embed(long)), vectors(on_cpu.embed(long)), atol=2e-5)
    np.testing.assert_allclose(vectors(on_gpu.embed(TEXTS)), vectors(expected), atol=1e-6)


class MailboxPort(Clients):
    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.embedded: list[Embedded] = []

    def send(self, message: FromEngine) -> None:
        if isinstance(message, Embedded):
            self.embedded.append(message)
        else:
            super().send(message)


def everybody(_: Clients) -> Iterator[list[ToEngine]]:
    for number, request in enumerate(workload(1, greedy=True)[:6]):
        yield [Submit(request), Embed(f"e{number}", SHORT)]
        yield []
        yield [Embed(f"s{number}", SHORT[2:], [3, 9])]


@pytest.mark.parametrize("device", ["cpu-overlapped", pytest.param("cuda", marks=NEEDS_GPU)])
def test_texts_between_steps_that_are_under_way(device: str) -> None:
    made, mail = assembled(CONFIG, device, block_size=16), MailboxPort(everybody)
    assert made.embedder is not None
    scheduler = Scheduler(
        KVCache(200, 16), StepBudget(96, target_s=None, floor=16), max_num_seqs=made.limits.max_num_seqs
    )
    engine = Engine(scheduler, made.runner, embeddings=EmbedQueue(made.embedder))
    EngineLoop(engine, mail, TickingClock()).run()

    assert len(mail.finished) == len(mail.embedded) // 2 == 6
    Judge(RandomCheckpoint(CONFIG), longest=CONFIG.context_length).check_all(mail)
    expected = {"e": vectors(made.embedder.embed(SHORT)), "s": made.embedder.score(SHORT[2:], [3, 9])}
    for answer in mail.embedded:
        np.testing.assert_allclose(vectors([answer.values]), expected[answer.request_id[0]], atol=1e-4)
