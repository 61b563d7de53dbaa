"""Every number format over ranks that are processes: the tokens of one process with the same settings.

Parts of a product are rounded apart, so an answer may part from the other where two tokens are as good as each other;
nowhere else. `make test` has each layout and each kind of format at least once, `make test-parallel` all with all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig

from penstock.core.errors import ModelUnsupported
from penstock.core.model_config import Experts, ModelConfig
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.core.settings import EngineSettings
from penstock.hub.encoder import EncoderCheckpoint
from penstock.hub.resolve import resolve
from penstock.model.random_weights import RandomCheckpoint
from penstock.runner.ranks.assemble import assemble_ranks
from tests.hub import fp8_checkpoints, integer_checkpoints
from tests.hub.families import SHAPE as HF_SHAPE
from tests.hub.families import random_model, tensors_of, write_gguf
from tests.hub.gguf_random import BLOCKS
from tests.hub.mxfp4_checkpoints import write_mxfp4
from tests.model.family_configs import CONFIGS, SHAPE
from tests.runner.clients import Clients, one_after_the_other, serve
from tests.runner.devices import end_ranks
from tests.template import RANK, forked, started_by
from tests.waiting import eventually

pytestmark = pytest.mark.slow

CONFIG = LlamaConfig(**(HF_SHAPE | {"hidden_size": 128, "intermediate_size": 256}), max_position_embeddings=64)
WHOLE_BLOCKS = LlamaConfig(**(HF_SHAPE | {"hidden_size": 512, "intermediate_size": 512}), max_position_embeddings=64)
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 8, "num_kv_heads": 2}  # whole groups of 128 for two
DENSE = replace(SHAPE, **WIDE)  # type: ignore[arg-type]
MIXTURE = replace(CONFIGS["mixtral"], **WIDE, experts=Experts(8, 2, 256))  # type: ignore[arg-type]
TIE = 0.05  # between log probabilities: such tokens may change places
ROUNDED_TIE = 0.2  # where ranks round parts of rows to 8 bits, and parts of weights that they read plain
NUM_BLOCKS = 64
GROUPED = [(("quant", "int8"),), (("quant", "int4"),)]


@dataclass(frozen=True)
class Format:
    """A model in files, or random numbers that are rounded while they are loaded."""

    write: Callable[[Path], Path] | None = None
    config: ModelConfig = DENSE
    settings: tuple[tuple[str, str], ...] = ()
    tie: float = TIE


def gguf(quantization: str) -> Callable[[Path], Path]:
    """Blocks of 256 inputs need more of them: two ranks have one block of each row."""
    config = WHOLE_BLOCKS if quantization.endswith("K") else CONFIG
    return lambda path: write_gguf(path / "model.gguf", config, tensors_of(random_model(config)), quantization)


def integers(layout: str) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        integer_checkpoints.write_integers(path, integer_checkpoints.LAYOUTS[layout], CONFIG)
        return path

    return write


def fp8(layout: str) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        fp8_checkpoints.write_fp8(path, fp8_checkpoints.LAYOUTS[layout], CONFIG)
        return path

    return write


def mxfp4(path: Path) -> Path:
    write_mxfp4(path)
    return path


FORMATS = {
    **{f"GGUF {name}": Format(gguf(name)) for name in (*BLOCKS, "F16", "BF16")},
    **{name: Format(integers(name)) for name in integer_checkpoints.LAYOUTS},
    **{f"FP8, {name}": Format(fp8(name)) for name in fp8_checkpoints.LAYOUTS},
    "MXFP4": Format(mxfp4, CONFIGS["gpt-oss"]),
    **{
        f"{'mixture, ' * (config is MIXTURE)}{quant}": Format(None, config, (("quant", quant),), tie)
        for config in (DENSE, MIXTURE)
        for quant, tie in (("int8", TIE), ("int4", TIE), ("w8a8", ROUNDED_TIE))
    },
    "KV cache int8": Format(None, DENSE, (("kv_dtype", "int8"),)),
    "bfloat16": Format(None, DENSE, (("dtype", "bfloat16"),), ROUNDED_TIE),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp=2": {"tp": 2},
    "tp=4": {"tp": 4},
    "tp=2 sp=2": {"tp": 2, "sp": 2},
    "pp=2": {"pp": 2},
    "tp=2 pp=2": {"tp": 2, "pp": 2},
    "tp=2 ep=2": {"tp": 2, "ep": 2, "redundant_experts": 1},
}
SELECTED = [
    ("GGUF Q4_0", "tp=2"),
    ("GGUF Q4_K", "tp=4"),
    ("GGUF Q6_K", "tp=2 pp=2"),
    ("GPTQ", "tp=4"),
    ("GPTQ, one group", "tp=2"),
    ("GPTQ, act-order", "pp=2"),
    ("AWQ", "tp=2 sp=2"),
    ("packed, asymmetric", "tp=2 pp=2"),
    ("W8A8", "tp=4"),
    ("W8A16", "pp=2"),
    ("FP8, fp8, static", "tp=4"),
    ("FP8, compressed-tensors, a scale per row", "pp=2"),
    ("MXFP4", "tp=2"),
    ("MXFP4", "tp=2 ep=2"),
    ("int4", "tp=2 pp=2"),
    ("w8a8", "tp=2"),
    ("mixture, int8", "tp=2 ep=2"),
    ("KV cache int8", "tp=2 sp=2"),
    ("bfloat16", "tp=2"),
]


def is_possible(name: str, layout: str) -> bool:
    if "act-order" in name and "tp" in layout:
        return False
    if layout == "tp=4" and FORMATS[name].settings in GROUPED:
        return False  # groups that are made while a model is loaded are then shorter than those of the whole weight
    return "ep" not in layout or FORMATS[name].config.experts is not None


def answers(model: str | ModelConfig, **wanted: Any) -> Clients:
    """Greedy answers, with the best tokens beside each."""
    if isinstance(model, ModelConfig):
        checkpoint: Any = RandomCheckpoint(model)
    else:
        checkpoint = resolve(model)
        assert not isinstance(checkpoint, EncoderCheckpoint)
    settings = EngineSettings(
        device="cpu",
        block_size=4,
        max_num_seqs=6,
        chunk_tokens=16,
        threads=1,
        speculate="off",
        **{"dtype": "float32", **wanted},
    )
    with forked():
        assembly = assemble_ranks(checkpoint, model, settings, lambda *_: None)
    vocab, dice = checkpoint.config.vocab_size, np.random.default_rng(7)
    asked = [
        Request(
            f"r{number}",
            dice.integers(0, vocab, 3 + 5 * number).tolist(),
            10,
            SamplingParams(temperature=0.0, num_logprobs=2),
        )
        for number in range(4)
    ]
    clients = Clients(one_after_the_other(asked, apart=2))
    serve(assembly, clients, num_blocks=NUM_BLOCKS)
    if assembly.parallelism.num_ranks > 1:
        end_ranks(assembly)
    return clients


def assert_same_tokens(ours: Clients, theirs: Clients, tie: float) -> None:
    num_equal = 0
    for name, expected in theirs.finished.items():
        found = ours.finished[name]
        for place, (token, other) in enumerate(zip(expected.token_ids, found.token_ids, strict=True)):
            (_, best), (_, second) = expected.logprobs[place].top
            if token != other:
                assert best - second < tie, f"{name}: token {place} is {other}, and not {token}"
                break
            assert abs(expected.logprobs[place].logprob - found.logprobs[place].logprob) < tie
            num_equal += 1
    assert num_equal >= 20, "of 40 tokens most are no ties"


Model = str | ModelConfig


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """Files of formats, each written once, or the shape whose weights are rounded while they are loaded."""

    @cache
    def written(name: str) -> Model:
        kind = FORMATS[name]
        return str(kind.write(tmp_path_factory.mktemp("model"))) if kind.write is not None else kind.config

    return written


@pytest.fixture(scope="module")
def of_one_process(models: Callable[[str], Model]) -> Callable[[str], Clients]:
    return cache(lambda name: answers(models(name), **dict(FORMATS[name].settings)))


@pytest.mark.parametrize(
    ("name", "layout"),
    [pytest.param(*pair) for pair in SELECTED]
    + [
        pytest.param(name, layout, marks=pytest.mark.drill)
        for name in FORMATS
        for layout in LAYOUTS
        if is_possible(name, layout) and (name, layout) not in SELECTED
    ],
)
def test_tokens_are_those_of_one_process(
    name: str, layout: str, models: Callable[[str], Model], of_one_process: Callable[[str], Clients]
) -> None:
    kind = FORMATS[name]
    ours = answers(models(name), **dict(kind.settings), **LAYOUTS[layout])
    assert_same_tokens(ours, of_one_process(name), kind.tie)


@pytest.mark.parametrize("name", ["GPTQ, act-order", "packed, act-order"])
def test_inputs_in_an_order_of_their_own_are_refused_and_no_rank_is_left(
    name: str, models: Callable[[str], Model]
) -> None:
    others = {process.pid for process in started_by(os.getpid(), RANK)}  # of tests before this one
    with pytest.raises(ModelUnsupported, match=r"o_proj\.weight' .*act-order"):
        answers(models(name), tp=2)
    eventually(lambda: {process.pid for process in started_by(os.getpid(), RANK)} - others, lambda left: not left)
