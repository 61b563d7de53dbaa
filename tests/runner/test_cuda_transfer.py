"""KV blocks between engines on one GPU: real processes, by CUDA IPC and by TCP, against what one engine says alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from tools.kv_transfer_gpu.engines import EngineProcess

from penstock.core.settings import EngineSettings
from penstock.runner.cuda_kv_memory import DeviceMemory
from penstock.transfer.messages import Layout
from tests.devices import NEEDS_GPU
from tests.model.family_configs import SHAPE

pytestmark = NEEDS_GPU

NUM_TOKENS = 12


class Two:
    """An engine that answers, and one that lends: the same weights."""

    def __init__(self, mover: Literal["cuda", "tcp"]) -> None:
        settings = EngineSettings(
            device="cuda",
            kv_port=0,
            kv_mover=mover,
            dtype="float32",
            block_size=16,
            max_num_seqs=4,
            chunk_tokens=64,
            memory_fraction=0.05,
            parkable=True,
        )
        self.puller, self.lender = (self._started(settings) for _ in range(2))
        self._dice, self._count = random.Random(mover), 0

    @staticmethod
    def _started(settings: EngineSettings) -> EngineProcess:
        """One after the other: each measures how much of the card is free."""
        engine = EngineProcess(SHAPE, settings)
        engine.wait_ready()
        return engine

    def prompt(self, length: int) -> list[int]:
        return self._dice.choices(range(SHAPE.vocab_size), k=length)

    def alone(self, prompt: list[int]) -> list[int]:
        return self.lender.submit(self._name(), prompt, NUM_TOKENS).wait()

    def pulled(self, prompt: list[int], *, prefills: bool = False) -> tuple[list[int], int]:
        """Tokens of the answer, and how many of the prompt's came from the other engine."""
        answer = self.puller.submit(self._name(), prompt, NUM_TOKENS, self.lender.address, prefills=prefills)
        tokens = answer.wait()
        assert answer.timings is not None
        return tokens, answer.timings.pulled_tokens

    def _name(self) -> str:
        self._count += 1
        return str(self._count)

    def close(self) -> None:
        for each in (self.puller, self.lender):
            each.close()


@pytest.fixture(scope="module", params=["cuda", "tcp"])
def two(request: pytest.FixtureRequest) -> Iterator[Two]:
    made = Two(request.param)
    yield made
    made.close()


def test_answers_are_those_of_one_engine(two: Two) -> None:
    for length in (17, 64, 65, 200, 243):
        prompt = two.prompt(length)
        assert two.pulled(prompt, prefills=True) == (two.alone(prompt), (length - 1) // 16 * 16)
        warm = two.prompt(length)
        said = two.alone(warm)
        assert two.pulled(warm) == (said, (length - 1) // 16 * 16)


def test_many_prompts_at_once_do_not_mix(two: Two) -> None:
    prompts = [two.prompt(30 + 17 * number) for number in range(10)]
    answers = [
        two.puller.submit(two._name(), prompt, NUM_TOKENS, two.lender.address, prefills=True) for prompt in prompts
    ]
    assert [answer.wait() for answer in answers] == [two.alone(prompt) for prompt in prompts]
    assert sum(answer.timings.pulled_tokens for answer in answers if answer.timings is not None) > 0


def test_a_parked_engine_gives_its_memory_back_and_lends_the_new_one(two: Two) -> None:
    prompt = two.prompt(100)
    said = two.alone(prompt)
    two.lender.park()
    assert two.pulled(two.prompt(100))[1] == 0
    two.lender.wake()
    assert two.alone(prompt) == said
    tokens, num_pulled = two.pulled(prompt)
    while num_pulled == 0:  # it was tried a moment ago
        prompt = two.prompt(100)
        said = two.alone(prompt)
        tokens, num_pulled = two.pulled(prompt)
    assert tokens == said


def test_a_lender_that_is_killed_costs_time_only(two: Two) -> None:
    prompts = [two.prompt(240) for _ in range(6)]
    said = [two.alone(prompt) for prompt in prompts]
    answers = [two.puller.submit(two._name(), prompt, NUM_TOKENS, two.lender.address) for prompt in prompts]
    two.lender.kill()
    assert [answer.wait() for answer in answers] == said


def test_blocks_pass_through_memory_that_no_step_still_writes() -> None:
    """A step's temporary memory is free for the allocator as soon as the host is done with it, and the step may still
    run. A copy beside the step does not wait for it, so its memory must be another."""
    num_blocks = 64  # enough that the allocator would give out a temporary's own memory
    pool = torch.zeros(2, 2, num_blocks, 2, 16, 32, device="cuda")
    layout = Layout("model", "triton", "float32", "", "float32", 16, "TP1")
    memory = DeviceMemory(pool, layout)
    torch.cuda.synchronize()
    of_a_step = [torch.empty_like(pool) for _ in range(8)]
    torch.cuda._sleep(1_000_000_000)  # cycles: the step goes on for half a second
    for each in of_a_step:
        each.fill_(7.0)
    del of_a_step, each
    with memory.writing(range(num_blocks)) as staged:
        for view in staged.views:
            view[:] = b"\0" * len(view)
    with memory.reading(range(num_blocks)) as staged:
        assert {bytes(view) for view in staged.views} == {b"\0" * len(staged.views[0])}
    torch.cuda.synchronize()
    assert not pool.any()
    assert not staged.device.any(), "the step has written here"
