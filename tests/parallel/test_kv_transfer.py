"""KV blocks between engines of several ranks: the leader lends and takes the parts of all. Answers are those of one
engine, by either mover; engines that share a model out differently refuse each other by name."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import pytest
from tools.kv_transfer_gpu.engines import EngineProcess

from penstock.core.model_config import ModelConfig
from penstock.core.settings import EngineSettings
from tests.model.family_configs import CONFIGS, SHAPE
from tests.template import forked

pytestmark = pytest.mark.slow

BLOCK, NUM_TOKENS = 16, 8
Mover = Literal["auto", "tcp"]


@contextmanager
def engines(
    *layouts: dict[str, int], mover: Mover = "auto", config: ModelConfig = SHAPE
) -> Iterator[list[EngineProcess]]:
    settings = [
        EngineSettings(
            device="cpu",
            kv_port=0,
            kv_mover=mover,
            dtype="float32",
            block_size=BLOCK // layout.get("sp", 1),  # of a rank's part
            max_num_seqs=4,
            chunk_tokens=64,
            threads=1,
            **layout,  # type: ignore[arg-type]
        )
        for layout in layouts
    ]
    with forked():
        started = [EngineProcess(config, each) for each in settings]
        for each in started:
            each.wait_ready()
    try:
        yield started
    finally:
        for each in started:
            each.close()


@pytest.mark.parametrize(
    ("layout", "mover", "family"),
    [
        ({"tp": 2}, "auto", "llama"),
        ({"tp": 2}, "tcp", "llama"),
        ({"pp": 2}, "auto", "llama"),
        ({"tp": 2, "sp": 2}, "auto", "llama"),
        ({"tp": 2}, "auto", "deepseek-v3"),  # each rank has all of what a token is kept as
    ],
    ids=str,
)
def test_blocks_of_all_ranks_are_pulled(layout: dict[str, int], mover: Mover, family: str) -> None:
    dice = random.Random(1)
    with engines(layout, layout, mover=mover, config=CONFIGS.get(family, SHAPE)) as (puller, lender):
        for number, length in enumerate((40, 150, 33)):
            prompt = dice.choices(range(SHAPE.vocab_size), k=length)
            prefills = number % 2 == 0  # else it was asked before
            before = [] if prefills else lender.submit(f"warm {number}", prompt, NUM_TOKENS).wait()
            answer = puller.submit(f"pulled {number}", prompt, NUM_TOKENS, lender.address, prefills=prefills)
            tokens = answer.wait()
            assert answer.timings is not None
            assert answer.timings.pulled_tokens == (length - 1) // BLOCK * BLOCK
            assert tokens == (before or lender.submit(f"after {number}", prompt, NUM_TOKENS).wait())


def test_engines_that_share_a_model_out_differently_refuse_each_other(capfd: pytest.CaptureFixture[str]) -> None:
    prompt = random.Random(2).choices(range(SHAPE.vocab_size), k=100)
    with engines({"tp": 2}, {}) as (puller, lender):
        said = lender.submit("alone", prompt, NUM_TOKENS).wait()
        answer = puller.submit("refused", prompt, NUM_TOKENS, lender.address)
        assert answer.wait() == said
        assert answer.timings is not None
        assert answer.timings.pulled_tokens == 0
    assert "parallelism is TP1 here and TP2 there" in capfd.readouterr().err
