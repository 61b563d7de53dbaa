"""Weights of 4 and 8 bits in the C kernels: products of integers, held to the formula; a row's result is the same to
the bit whatever it was computed with."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.library import GROUP
from penstock.model.ops.native import NativeOps
from penstock.model.quantized import Weight
from penstock.model.quantized.grouped import GroupedWeight
from penstock.model.quantized.int8 import Int8Weight
from penstock.model.quantized.mxfp4 import Mxfp4Weight
from penstock.quant import mxfp4
from tests.model.ops.low_bit import grouped, per_channel

BOTH = frozenset({4, 8})


@lru_cache
def native(threads: int = 2) -> NativeOps | None:
    try:
        return NativeOps("float32", threads=threads, keeps=BOTH)
    except KernelsUnavailable:
        return None


@pytest.fixture
def ops() -> NativeOps:
    torch.manual_seed(0)
    found = native()
    if found is None:
        pytest.skip("this machine has no kernels for weights of few bits")
    return found


def as_seen(x: Tensor, bits: int, *, precise: bool) -> Tensor:
    """Rows as the kernels multiply them. Values have two digits in every quad of a precise linear, in another's only in
    the quad with a group's largest magnitude. Quads are compared by magnitudes whose last three bits are the quad's
    number."""
    m, k = x.shape
    groups = F.pad(x, (0, -k % GROUP)).view(m, -1, GROUP)
    quads = groups.view(m, -1, 8, 4).abs().amax(3).view(torch.int32)
    keys = quads & ~7 | torch.arange(8, dtype=torch.int32)
    largest = keys.sort(2).values[:, :, -2:].contiguous().view(torch.float32)
    rest, top = largest[:, :, :1], largest[:, :, 1:]
    one, two = torch.tensor([1 / 127, 1 / (127 << (4 if bits == 4 and not precise else 7))])
    scales = top * two if precise else torch.maximum(rest * one, top * two)
    inverses = torch.where(scales >= torch.finfo(torch.float32).tiny, 1 / scales, 0)
    return ((groups * inverses).round().double() * scales).view(m, -1)[:, :k]


WEIGHTS: dict[str, Callable[[int, int], GroupedWeight | Int8Weight | Mxfp4Weight]] = {
    "4 bits, minimums": lambda n, k: grouped(torch.randn(n, k), 4, 32, has_minimums=True),
    "4 bits, zeros, wide groups": lambda n, k: grouped(torch.randn(n, k), 4, 128, has_zeros=True),
    "4 bits": lambda n, k: grouped(torch.randn(n, k), 4, 64),
    "8 bits, minimums": lambda n, k: grouped(torch.randn(n, k), 8, 32, has_minimums=True),
    "8 bits": lambda n, k: grouped(torch.randn(n, k), 8, 32),
    "8 bits per output": lambda n, k: per_channel(torch.randn(n, k)),
    "8 bits, small groups": lambda n, k: grouped(torch.randn(n, k), 8, 16),
    "4 bits, small groups, minimums": lambda n, k: grouped(torch.randn(n, k), 4, 16, has_minimums=True),
    "MXFP4": lambda n, k: mxfp4.quantized(torch.randn(n, k) * torch.randn(n, 1).exp()),
}
# Scales in half precision are kept as they are; products of zeros and scales, and float32, are rounded to 11 bits.
ROUNDED_SCALES = ("4 bits, zeros, wide groups", "8 bits per output")


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 576, 1536), (13, 31, 128), (100, 48, 256)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("precise", [False, True])
def test_linear_is_the_product_of_what_was_rounded(
    ops: NativeOps, kind: str, m: int, n: int, k: int, has_bias: bool, precise: bool
) -> None:
    weight, x, bias = WEIGHTS[kind](n, k), torch.randn(m, k), torch.randn(n) if has_bias else None
    kept_bits = 8 if "8 bits" in kind or "small groups" in kind or kind == "MXFP4" else 4
    seen = as_seen(x, kept_bits, precise=precise)
    expected = F.linear(seen, weight.dequantized().double(), None if bias is None else bias.double())
    found = ops.linear(weight, bias, precise=precise)(x).double()
    assert (found - expected).norm() / expected.norm() < (1e-3 if kind in ROUNDED_SCALES else 2e-6)


@pytest.mark.parametrize(("precise", "most"), [(False, 0.01), (True, 1e-4)])
def test_activations_are_rounded_and_no_more(ops: NativeOps, precise: bool, most: float) -> None:
    """The error against the unrounded product is what 8 bits must cost, or 15."""
    weight, x = grouped(torch.randn(512, 2048), 4, 32, has_minimums=True), torch.randn(16, 2048)
    expected = F.linear(x.double(), weight.dequantized().double())
    error = (ops.linear(weight, precise=precise)(x).double() - expected).norm() / expected.norm()
    assert error < most


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("size", [10.0, 1000.0])
def test_an_outlier_costs_the_values_beside_it_little(ops: NativeOps, kind: str, size: float) -> None:
    weight, x = WEIGHTS[kind](64, 2048), torch.randn(16, 2048)
    usual = F.linear(x.double(), weight.dequantized().double()).norm()
    x[:, 5::GROUP] *= size
    expected = F.linear(x.double(), weight.dequantized().double())
    rounded = 1e-3 * expected.norm() if kind in ROUNDED_SCALES else 0.0
    # One digit alone would leave an error of `size` percent.
    for precise, most in ((False, 0.02 if size == 10.0 else 0.5), (True, size / 10_000)):
        error = (ops.linear(weight, precise=precise)(x).double() - expected).norm()
        assert error < usual * most + rounded


@settings(max_examples=30, deadline=None)
@given(
    bits=st.sampled_from([4, 8]),
    m=st.integers(1, 100),
    n=st.integers(1, 100),
    k=st.integers(1, 300),
    start=st.integers(0, 99),
    count=st.integers(1, 100),
    has_minimums=st.booleans(),
    is_fine=st.booleans(),
    precise=st.booleans(),
)
def test_rows_do_not_depend_on_the_rows_beside_them(
    bits: Literal[4, 8],
    m: int,
    n: int,
    k: int,
    start: int,
    count: int,
    has_minimums: bool,
    is_fine: bool,
    precise: bool,
) -> None:
    several, one = native(), native(threads=1)
    assume(several is not None and one is not None)
    assert several is not None
    assert one is not None
    k = -(-k // 16) * 16 if is_fine else k + k % 2
    x = torch.randn(m, k)
    weight = grouped(torch.randn(n, k), bits, 16 if is_fine else k, has_minimums=has_minimums)
    whole, first = several.linear(weight, precise=precise)(x), start % m
    alone = one.linear(weight, precise=precise)(x[first : first + count])
    assert torch.equal(whole[first : first + count], alone)


@pytest.mark.parametrize(
    "kind",
    [
        "4 bits, minimums",
        "8 bits, minimums",
        "8 bits",
        "8 bits, small groups",
        "4 bits, small groups, minimums",
        "MXFP4",
    ],
)
def test_tied_embedding_reads_the_head_s_rows(ops: NativeOps, kind: str) -> None:
    table = WEIGHTS[kind](50, 96)
    embedding, head = ops.tied(table)
    ids = torch.tensor([0, 49, 17, 17, 3], dtype=torch.int32)
    assert torch.equal(embedding(ids), table.dequantized()[ids])
    assert torch.equal(ops.embedding(table)(ids), table.dequantized()[ids])
    x = torch.randn(3, 96)
    assert torch.equal(head(x), ops.linear(table)(x))


def test_columns_in_another_order_meet_their_activations(ops: NativeOps) -> None:
    plain, x, order = grouped(torch.randn(40, 64), 4, 32), torch.randn(5, 64), torch.randperm(64)
    ordered = GroupedWeight(plain.values, 4, plain.scales, order=order)
    assert torch.equal(ops.linear(ordered)(x), ops.linear(plain)(x[:, order]))


@pytest.mark.parametrize("size", [1e-9, 1e6])
def test_scales_of_any_size_keep_their_precision(ops: NativeOps, size: float) -> None:
    weight, x = per_channel(torch.randn(32, 256)), torch.randn(3, 256)
    moved = Int8Weight(weight.values, weight.scales * size)
    torch.testing.assert_close(ops.linear(moved)(x) / size, ops.linear(weight)(x), rtol=1e-3, atol=0.02)


@pytest.mark.parametrize("precise", [False, True])
def test_rows_of_nothing_give_the_bias(ops: NativeOps, precise: bool) -> None:
    weight, bias = grouped(torch.randn(20, 64), 4, 32, has_minimums=True), torch.randn(20)
    found = ops.linear(weight, bias, precise=precise)(torch.zeros(3, 64))
    assert torch.equal(found, bias.expand(3, -1))


@pytest.mark.parametrize(
    "weight",
    [grouped(torch.randn(20, 64), 4, 16), grouped(torch.randn(20, 64), 8, 32), grouped(torch.randn(20, 64), 4, 8)],
    ids=["groups too small for 4 bits", "of bits that are not kept", "groups too small"],
)
def test_what_there_is_no_kernel_for_is_widened(ops: NativeOps, weight: Weight) -> None:
    only_4, x = NativeOps("float32", threads=1, keeps=frozenset({4})), torch.randn(2, 64)
    assert not isinstance(weight, Tensor)
    assert torch.equal(only_4.linear(weight)(x), only_4.linear(weight.dequantized())(x))


def test_nothing_is_kept_unless_asked_for(ops: NativeOps) -> None:
    weight, x, exact = grouped(torch.randn(20, 64), 4, 32), torch.randn(2, 64), NativeOps("float32", threads=1)
    assert torch.equal(exact.linear(weight)(x), exact.linear(weight.dequantized())(x))
