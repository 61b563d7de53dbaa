"""All layers in one call: the same to the bit as operation by operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from penstock.model.batch import Batch
from penstock.model.layers import Attention, Decoder, DecoderLayer
from penstock.model.loading import random_model
from penstock.model.ops import Layer, LayerKV, Linear, Stream, one_by_one
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.library import ARITHMETICS
from penstock.model.ops.native import NativeOps
from penstock.quant import Quant, to_quant
from tests.model.paged import PagedDriver
from tests.runner.small import CONFIG

WIDE = replace(CONFIG, architecture="qwen3", hidden_size=64, intermediate_size=96, windows=(None, 5))
PROMPT = [3, 1, 4, 15, 9, 26, 5, 35, 8, 9, 7, 9]


class OneByOne(NativeOps):
    def run_layers(self, layers: Sequence[Layer], stream: Stream, kv: Sequence[LayerKV], batch: Batch) -> None:
        one_by_one(layers, stream, kv, batch)


def logits(ops: NativeOps, quant: Quant) -> Tensor:
    """Of a prompt in chunks, and of single tokens behind it."""
    driver = PagedDriver(random_model(WIDE, ops, quantize=partial(to_quant, quant)), ops, block_size=4)
    return torch.cat([driver.prefill(PROMPT, chunk=5), driver.prefill(PROMPT, chunk=1)])


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("quant", ["none", "int4", "w8a8"])
def test_a_whole_model_at_once_is_its_operations_one_by_one(arithmetic: str, quant: Quant) -> None:
    keeps = frozenset[int]() if quant == "none" else frozenset({4, 8})
    try:
        made = [kind(arithmetic, threads=2, keeps=keeps) for kind in (NativeOps, OneByOne)]
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
    together, apart = (logits(ops, quant) for ops in made)
    assert torch.equal(together, apart)


@dataclass(frozen=True)
class Doubled:
    linear: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return 2 * self.linear(x)


@pytest.fixture
def ops() -> NativeOps:
    try:
        return NativeOps("float32", threads=1)
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))


def test_a_layer_with_a_linear_that_c_does_not_know_is_asked_itself(ops: NativeOps) -> None:
    model = random_model(WIDE, ops)
    assert isinstance(model, Decoder)
    layers = [_with_doubled_output(layer) for layer in model.layers]
    plain, doubled = (
        PagedDriver(model, ops, block_size=4),
        PagedDriver(replace(model, layers=layers), ops, block_size=4),
    )
    first = plain.prefill(PROMPT)
    assert not torch.equal(doubled.prefill(PROMPT), first)
    assert torch.equal(plain.prefill(PROMPT), first), "the two are told apart"


def _with_doubled_output(layer: Layer) -> Layer:
    assert isinstance(layer, DecoderLayer)
    attention: Attention = replace(layer.attention, output=Doubled(layer.attention.output))
    return replace(layer, attention=attention)


def test_another_cache_is_noticed(ops: NativeOps) -> None:
    model = random_model(WIDE, ops)
    first, second = (PagedDriver(model, ops, block_size=4) for _ in range(2))
    expected = first.prefill(PROMPT)
    assert torch.equal(second.prefill(PROMPT), expected)
    assert torch.equal(second.kv[0].keys, first.kv[0].keys), "each wrote into its own"
