"""KV blocks between engines of several ranks on one GPU: real processes, by CUDA IPC and by TCP. The leaders have the
caches of all their ranks mapped; answers are those of the engine that lends.

Ranks share the card by NVIDIA's MPS, where it is installed. An engine is killed only while its device is idle: MPS
promises nothing to other processes when one ends in the middle of a kernel.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Literal

import pytest
from tools.kv_transfer_gpu.engines import Answer, EngineProcess

from penstock.core.settings import EngineSettings
from penstock.link.mps import start_mps
from penstock.runner.ranks.join import SHARE_VARIABLE
from tests.devices import NEEDS_GPU
from tests.model.family_configs import SHAPE
from tests.runner.devices import GPU_RANK_BLOCKS
from tests.template import forked

pytestmark = NEEDS_GPU

BLOCK, NUM_TOKENS = 16, 8
DICE = random.Random(0)
Mover = Literal["auto", "cuda", "tcp"]


def settings(mover: Mover, **layout: int) -> EngineSettings:
    return EngineSettings(
        device="cuda",
        kv_port=0,
        kv_mover=mover,
        dtype="float32",
        block_size=BLOCK,
        max_num_seqs=4,
        chunk_tokens=64,
        threads=1,
        parkable=True,
        **layout,  # type: ignore[arg-type]
    )


def start(*each: EngineSettings) -> list[EngineProcess]:
    with forked(), pytest.MonkeyPatch.context() as patched:
        patched.setenv(SHARE_VARIABLE, "1")
        started = [EngineProcess(SHAPE, one, GPU_RANK_BLOCKS) for one in each]
        for engine in started:
            engine.wait_ready()
    return started


def stop(engines: Sequence[EngineProcess]) -> None:
    for engine in engines:
        engine.close()


def make_prompt(length: int) -> list[int]:
    return DICE.choices(range(SHAPE.vocab_size), k=length)


def submit(engine: EngineProcess, prompt: list[int], lender: EngineProcess | None = None, **options: bool) -> Answer:
    name = f"request {DICE.getrandbits(64)}"
    return engine.submit(name, prompt, NUM_TOKENS, lender.address if lender is not None else None, **options)


def num_pulled(answer: Answer) -> int:
    assert answer.timings is not None
    return answer.timings.pulled_tokens


@pytest.fixture(scope="module", autouse=True)
def mps(tmp_path_factory: pytest.TempPathFactory) -> None:
    start_mps(tmp_path_factory.mktemp("mps"))


class Three:
    """Engines of two ranks each, with the same weights: one that lends, and one that pulls by each mover."""

    def __init__(self) -> None:
        self.lender, cuda, tcp = start(settings("auto", tp=2), settings("cuda", tp=2), settings("tcp", tp=2))
        self.pullers = {"cuda": cuda, "tcp": tcp}


@pytest.fixture(scope="module")
def three(mps: None) -> Iterator[Three]:
    made = Three()
    yield made
    stop([made.lender, *made.pullers.values()])


def same_answers(puller: EngineProcess, lender: EngineProcess, block: int = BLOCK) -> None:
    for number, length in enumerate((17, 64, 65, 200, 243)):
        prompt, prefills = make_prompt(length), number % 2 == 0  # else it was asked before
        before = [] if prefills else submit(lender, prompt).wait()
        answer = submit(puller, prompt, lender, prefills=prefills)
        tokens = answer.wait()
        assert num_pulled(answer) == (length - 1) // block * block
        assert tokens == (before or submit(lender, prompt).wait())


@pytest.mark.parametrize("mover", ["cuda", "tcp"])
def test_tensor_parallel_engines_pull_the_blocks_of_all_ranks(three: Three, mover: str) -> None:
    assert three.lender.movers == ("cuda", "tcp")
    same_answers(three.pullers[mover], three.lender)


@pytest.mark.parametrize("mover", ["cuda", "tcp"])
def test_many_prompts_at_once_do_not_mix(three: Three, mover: str) -> None:
    prompts = [make_prompt(30 + 17 * number) for number in range(10)]
    answers = [submit(three.pullers[mover], prompt, three.lender, prefills=True) for prompt in prompts]
    assert [answer.wait() for answer in answers] == [submit(three.lender, prompt).wait() for prompt in prompts]
    assert sum(num_pulled(answer) for answer in answers) > 0


def test_an_engine_of_another_size_is_refused_at_the_handshake(three: Three, capfd: pytest.CaptureFixture[str]) -> None:
    prompt = make_prompt(100)
    engines = start(settings("auto"))
    try:
        said = submit(engines[0], prompt).wait()
        answer = submit(three.pullers["cuda"], prompt, engines[0])
        assert answer.wait() == said
        assert num_pulled(answer) == 0
    finally:
        stop(engines)
    assert "parallelism is TP1 here and TP2 there" in capfd.readouterr().err


@pytest.mark.parametrize("layout", [{"pp": 2}, {"tp": 2, "sp": 2}], ids=str)
def test_stages_and_parts_of_sequences_are_pulled_too(layout: dict[str, int], mps: None) -> None:
    engines = start(settings("cuda", **layout), settings("cuda", **layout))
    try:
        same_answers(*engines, block=BLOCK * layout.get("sp", 1))  # `block_size` is that of a rank's part
    finally:
        stop(engines)


def test_a_parked_engine_lends_the_new_memory_of_all_ranks(three: Three) -> None:
    puller, lender = three.pullers["cuda"], three.lender
    prompt = make_prompt(100)
    said = submit(lender, prompt).wait()
    lender.park()
    answer = submit(puller, prompt, lender)
    assert answer.wait() == said
    assert num_pulled(answer) == 0
    lender.wake()
    assert submit(lender, prompt).wait() == said
    while True:  # it was tried a moment ago, and is not tried again at once
        prompt = make_prompt(100)
        said = submit(lender, prompt).wait()
        answer = submit(puller, prompt, lender)
        assert answer.wait() == said
        if num_pulled(answer):
            return


def test_a_lender_that_is_killed_costs_time_only(three: Three) -> None:
    """All ranks of it."""
    prompts = [make_prompt(240) for _ in range(6)]
    said = [submit(three.lender, prompt).wait() for prompt in prompts]
    answers = [submit(three.pullers["cuda"], prompt, three.lender) for prompt in prompts]
    three.lender.kill()
    assert [answer.wait() for answer in answers] == said
