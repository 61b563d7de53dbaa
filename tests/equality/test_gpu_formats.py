"""Every format on a GPU says what the numbers say that it stands for: linears, embedding and head, from memory and from
files; alone, and all of them in one model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.core.model_config import ModelConfig
from penstock.core.tokenizer_source import TokenizerMetadata
from penstock.hub.hf import HFCheckpoint
from penstock.hub.quantized_directory import QuantizedDirectory
from penstock.hub.stored import Part
from penstock.model.layers import CausalLM
from penstock.model.loading import load_model
from penstock.model.ops import Linear, Ops
from penstock.model.ops.reference import ReferenceOps
from penstock.model.ops.triton import TritonOps
from penstock.model.ops.triton.linear.w4a16_linear import W4A16Linear
from penstock.model.quantized import Weight, plain
from penstock.model.random_weights import RandomCheckpoint
from penstock.model.weights import Quantize
from penstock.quant import mxfp4
from penstock.quant.job import quantize
from penstock.quant.opened import as_met
from penstock.quant.recipe import make_recipe
from tests import devices
from tests.devices import NEEDS_SPEED
from tests.equality.formats import FORMATS, Kept, in_turn
from tests.interpreter import quick_interpreter as quick_interpreter
from tests.model.family_configs import CONFIGS
from tests.model.paged import PagedDriver

DEVICE, DTYPE = torch.device(devices.DEVICE), torch.bfloat16
TOLERANCE = 0.02  # of all logits' deviation from their mean: what bfloat16 costs
CONFIG = ModelConfig("llama", 320, 128, 192, 2, 4, 2, 32, 256)
RECIPES = {
    "gptq": {},
    "gptq, act-order": {"act_order": True},
    "gptq, 8 bits with zero points": {"bits": 8, "symmetric": False},
    "awq": {},
    "int8": {},
    "int8 in groups": {"group": 32},
    "fp8": {},
}


class RoundingOps(ReferenceOps):
    """Rounds rows to 8 bits too, in the formats that do. The GPU may leave a few rows as they are."""

    def linear(self, weight: Weight, bias: Tensor | None = None, *, precise: bool = True) -> Linear:
        product = super().linear(weight, bias, precise=precise)
        return lambda x: product(as_met(weight, x).to(x.dtype))

    def head(self, table: Weight) -> Linear:
        return super().linear(table)


class WithTables(RandomCheckpoint):
    """Its embedding and its head are in a format."""

    def __init__(self, config: ModelConfig, keep: Kept) -> None:
        super().__init__(config)
        self._keep = keep

    def draw(self, name: str, device: torch.device, part: Part | None = None) -> Tensor:
        weight = super().draw(name, device, part)
        return self._keep(weight) if name.startswith(("model.embed", "lm_head")) else weight  # type: ignore[return-value]


def logits(model: CausalLM, ops: Ops) -> Tensor:
    """Of two sequences: chunks of many rows and of few, decodes, and all of them together."""
    driver = PagedDriver(model, ops, block_size=16)
    first, second = (driver.sequence([(7 * i + k) % CONFIG.vocab_size for i in range(60)]) for k in range(2))
    steps = [[(first, 33)], [(first, 1), (second, 20)], [(first, 9), (second, 1)], [(first, 1), (second, 1)]]
    return torch.cat([driver.step(work, every_row=True) for work in steps])


def error_of(found: Tensor, expected: Tensor) -> float:
    spread = expected - expected.mean(dim=1, keepdim=True)
    return float((found - expected).norm() / spread.norm())


def check(
    checkpoint: RandomCheckpoint | HFCheckpoint, keep: Quantize = lambda weight: weight, tolerance: float = TOLERANCE
) -> None:
    """No further from the exact numbers than rounding rows costs, where the format does, and the arithmetic."""
    found, expected, rounded = (
        logits(load_model(checkpoint, ops, quantize=keep), ops)
        for ops in (TritonOps(DEVICE, DTYPE), ReferenceOps(DEVICE), RoundingOps(DEVICE))
    )
    assert error_of(found, expected) < 1.25 * error_of(rounded, expected) + tolerance


@NEEDS_SPEED
@pytest.mark.parametrize("name", FORMATS)
def test_a_model_in_this_format_says_what_its_numbers_say(name: str) -> None:
    keep = FORMATS[name]
    check(RandomCheckpoint(CONFIG), lambda weight: keep(plain(weight)))


@NEEDS_SPEED
def test_a_model_with_all_formats_in_turn_says_what_their_numbers_say() -> None:
    """More layers, so that every format comes in more than one place."""
    config = ModelConfig("llama", 320, 128, 192, 8, 4, 2, 32, 256)
    check(RandomCheckpoint(config), in_turn(), tolerance=0.03)


@NEEDS_SPEED
def test_gpt_oss_with_experts_in_mxfp4_says_what_their_numbers_say() -> None:
    """Every token has all experts: rounding changes nobody's choice."""
    known = CONFIGS["gpt-oss"]
    assert known.experts is not None
    config = replace(known, experts=replace(known.experts, count=4, per_token=4))
    check(RandomCheckpoint(config), lambda weight: mxfp4.quantized(plain(weight)), tolerance=0.03)


@NEEDS_SPEED
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", [name for name in FORMATS if "act-order" not in name])
def test_embedding_and_head_in_this_format_say_what_their_numbers_say(name: str, tied: bool) -> None:
    config = ModelConfig("llama", 320, 128, 192, 1, 4, 2, 32, 256, tied_embeddings=tied)
    check(WithTables(config, FORMATS[name]))


@NEEDS_SPEED
@pytest.mark.parametrize("name", RECIPES)
def test_a_directory_of_this_method_says_what_its_numbers_say(name: str, tmp_path: Path) -> None:
    """Quantized on the GPU too."""
    source = RandomCheckpoint(CONFIG, tokenizer_source=TokenizerMetadata({}, None))
    recipe = make_recipe(CONFIG, name.split(",")[0].split(" ")[0], **RECIPES[name])  # type: ignore[arg-type]
    token_ids = torch.randint(0, CONFIG.vocab_size, (4, 64), generator=torch.Generator().manual_seed(0))
    with QuantizedDirectory.opened(tmp_path, {"name": name}, CONFIG.num_layers) as directory:
        quantize(source, recipe, directory, token_ids, DEVICE, lambda *_: None)
        directory.finish(source, recipe.config(CONFIG), recipe.dtype, "{}", {})
    check(HFCheckpoint(tmp_path))


@pytest.mark.parametrize(
    "name", ["Q2_K", "Q3_K", "Q4_0", "Q4_1, Q4_K", "Q6_K", "Q8_0", "Q5_1, Q5_K", "Q4_K and Q6_K joined"]
)
def test_a_gguf_stays_small_in_the_gpus_memory(name: str) -> None:
    ops = TritonOps(DEVICE, DTYPE)
    weight = FORMATS[name](torch.randn(64, 256, device=DEVICE))
    for linear in (ops.linear(weight), ops.head(weight)):
        assert isinstance(linear, W4A16Linear)
        assert linear.weight.num_bytes <= 1.25 * weight.shape.numel()
    embedding = ops.embedding(weight)
    assert isinstance(embedding, partial)
    assert embedding.func.__name__ == W4A16Linear.rows.__name__
