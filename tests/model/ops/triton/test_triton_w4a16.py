"""Products with 4- and 8-bit integers on a GPU equal those with the numbers they stand for, for every number of rows
and kind of group, alone and fused; or on no GPU, interpreted."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.model_config import ModelConfig
from penstock.model.loading import random_model
from penstock.model.ops import KVShape, Norm, Stream
from penstock.model.ops.reference import ReferenceOps
from penstock.model.ops.triton import TritonOps
from penstock.model.ops.triton.common.rowwise import Quantization, quantize
from penstock.model.ops.triton.linear import gemv, w8a8
from penstock.model.ops.triton.linear.formats import FloatLinear
from penstock.model.ops.triton.linear.int4_pack import pack
from penstock.model.ops.triton.linear.w4a16_gemm import dequantized
from penstock.model.ops.triton.linear.w4a16_linear import MAX_MANY, MAX_ROWS, W4A16Linear
from penstock.model.quantized import Weight, plain
from penstock.model.quantized.grouped import Bits, GroupedWeight, packed
from penstock.quant import Quant, to_quant
from penstock.quant.integers import by_row
from tests.devices import BFLOAT16, DEVICE, NEEDS_INSTRUCTIONS, SLOW_INTERPRETED, matrix, slow
from tests.model.paged import PagedSequence, make_batch

TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 6e-3}
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, BFLOAT16], ids=str)
KINDS = ("symmetric", "zeros", "minimums")
# Chunks that fill the rows and that do not, groups as long as a part, a chunk, a row.
SHAPES = [(64, 256, 32), (64, 256, 128), (96, 576, 64), (64, 160, 160)]
# Interpreted, every shape, kind and number of bits, but not all of them together.
WEIGHTS = pytest.mark.parametrize(
    ("shape", "kind", "bits"),
    matrix(
        list(product(SHAPES, KINDS, [4, 8])),
        [
            ((18, 256, 32), "minimums", 4),
            ((18, 256, 128), "zeros", 8),
            ((18, 576, 64), "zeros", 4),
            ((18, 160, 160), "symmetric", 8),
        ],
    ),
    ids=str,
)


def integers(out: int, columns: int, group: int, bits: Bits, kind: str, *, ordered: bool = False) -> GroupedWeight:
    dice = torch.Generator().manual_seed(7)
    shape = (out, columns // group)
    values = torch.randint(0, 1 << bits, (out, columns), generator=dice, dtype=torch.uint8)
    scales = (torch.rand(shape, generator=dice) + 0.5) * columns**-0.5 / (1 << (bits - 2))
    zeros = torch.randint(1, 1 << bits, shape, generator=dice, dtype=torch.uint8).to(DEVICE)
    minimums = -torch.rand(shape, generator=dice) * columns**-0.5
    return GroupedWeight(
        (packed(values) if bits == 4 else values).to(DEVICE),
        bits,
        scales.half().to(DEVICE),
        zeros if kind == "zeros" else None,
        minimums.half().to(DEVICE) if kind == "minimums" else None,
        torch.randperm(columns, generator=dice).to(DEVICE) if ordered else None,
    )


def rows_of(count: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(count)).to(DEVICE, dtype)


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


@WEIGHTS
def test_words_stand_for_the_same_numbers(shape: tuple[int, int, int], kind: str, bits: Bits) -> None:
    weight, out = integers(*shape, bits, kind), shape[0]
    words, expected = pack(weight), weight.dequantized()
    assert relative_error(dequantized(words, torch.float32), expected) < 1e-3
    ids = torch.tensor([5, 0, out - 1, 17], dtype=torch.int32, device=DEVICE)
    assert relative_error(dequantized(words, torch.float32, ids), expected[ids.long()]) < 1e-3


@DTYPES
@WEIGHTS
def test_a_product_of_a_few_rows(shape: tuple[int, int, int], kind: str, bits: Bits, dtype: torch.dtype) -> None:
    weight, columns = integers(*shape, bits, kind), shape[1]
    linear, expected = TritonOps(DEVICE, dtype).linear(weight), weight.dequantized()
    assert isinstance(linear, W4A16Linear)
    for count in matrix([1, 2, 8, 9, MAX_ROWS], [11]):
        x = rows_of(count, columns, dtype)
        assert relative_error(linear(x), x.float() @ expected.T) < TOLERANCES[dtype]


@DTYPES
@pytest.mark.parametrize(
    ("bits", "kind"), matrix(list(product([4, 8], KINDS)), [(4, "symmetric"), (8, "zeros"), (4, "minimums")])
)
def test_a_product_of_many_rows(bits: Bits, kind: str, dtype: torch.dtype) -> None:
    weight = integers(matrix([96], [32])[0], 320, 320, bits, kind)
    linear, expected = TritonOps(DEVICE, dtype).linear(weight), weight.dequantized()
    for count in matrix([MAX_ROWS + 1, 64, 65, 200, MAX_MANY + 1], [MAX_ROWS + 1]):
        x = rows_of(count, 320, dtype)
        assert relative_error(linear(x), x.float() @ expected.T) < TOLERANCES[dtype]


@SLOW_INTERPRETED
@pytest.mark.parametrize("bits", [4, 8])
def test_groups_shorter_than_a_chunk_are_widened_for_many_rows(bits: Bits) -> None:
    weight = integers(matrix([64], [16])[0], 256, 32, bits, "minimums")
    x = rows_of(40, 256, torch.float16)
    found = TritonOps(DEVICE, torch.float16).linear(weight)(x)
    assert relative_error(found, x.float() @ weight.dequantized().T) < 2e-3


@pytest.mark.parametrize("count", matrix([1, 40], [1]))
def test_bias_and_order_of_columns(count: int) -> None:
    weight = integers(64, 256, 128, 4, "zeros", ordered=True)
    bias, x = torch.randn(64).half(), rows_of(count, 256, torch.float16)
    found = TritonOps(DEVICE, torch.float16).linear(weight, bias)(x)
    assert relative_error(found, x.float() @ weight.dequantized().T + bias.to(DEVICE).float()) < 2e-3


@pytest.mark.parametrize(
    ("ffn", "count"),  # whose halves are whole tiles, or not
    matrix(list(product([64, 56], [1, 3, 40])), [slow(64, 3), slow(56, 1), slow(64, 40)]),
)
def test_a_layer_with_another_format_in_each_linear(count: int, ffn: int) -> None:
    """Sums that wait for a norm meet products that norm, add and gate themselves."""
    dtype, hidden = torch.float16, 128
    four, eight = integers(hidden, hidden, 128, 4, "zeros"), integers(2 * ffn, hidden, 32, 8, "symmetric")
    down = torch.randn(hidden, ffn, generator=torch.Generator().manual_seed(1)).to(DEVICE) * ffn**-0.5
    norm = Norm(torch.ones(hidden, dtype=dtype, device=DEVICE), 1e-5)
    results = []
    for ops in (TritonOps(DEVICE, dtype), ReferenceOps(DEVICE, torch.float32)):
        wide = ops.activation_dtype
        stream = Stream(rows_of(count, hidden, dtype).to(wide))
        norms = Norm(norm.weight.to(wide), norm.eps)
        ops.add_linear(stream, rows_of(count + 100, hidden, dtype)[:count].to(wide), ops.linear(four))
        ops.feed_forward(stream, norms, ops.linear(eight), ops.linear(down))
        results.append(ops.norm_linear(stream, norms, ops.linear(four)))
    assert relative_error(*results) < 5e-3


@SLOW_INTERPRETED
def test_an_embedding_is_looked_up_in_integers() -> None:
    table = integers(96, 256, 32, 4, "minimums")
    embedding, head = TritonOps(DEVICE, torch.float16).tied(table)
    ids = torch.tensor([3, 95, 3, 40], dtype=torch.int32, device=DEVICE)
    assert relative_error(embedding(ids), table.dequantized()[ids.long()]) < 1e-3
    x = rows_of(2, 256, torch.float16)
    assert relative_error(head(x), F.linear(x.float(), table.dequantized())) < 2e-3


def test_groups_of_other_sizes_are_widened_when_they_are_loaded() -> None:
    weight = integers(64, 240, 24, 8, "symmetric")
    linear = TritonOps(DEVICE, torch.float16).linear(weight)
    assert isinstance(linear, FloatLinear)
    x = rows_of(2, 240, torch.float16)
    assert relative_error(linear(x), x.float() @ weight.dequantized().T) < 2e-3


@SLOW_INTERPRETED
def test_integers_times_integers_are_exact_before_they_are_scaled() -> None:
    """Of many rows, or where there are no instructions of a GPU's own."""
    weight = by_row(rows_of(48, 80, torch.float32).cpu())
    rows = quantize(rows_of(70, 80, torch.float16), Quantization(None, torch.int8))
    kept = gemv.Weight(weight.values.to(DEVICE), weight.scales.to(DEVICE), torch.ones(48, device=DEVICE).half())
    found = w8a8.product(rows, kept, torch.float32)
    sums = rows.values.double() @ kept.values.double().T
    expected = sums * rows.scales.double()[:, None] * weight.scales.to(DEVICE).double() + 1.0
    assert relative_error(found, expected) < 1e-6


@NEEDS_INSTRUCTIONS
@pytest.mark.parametrize("count", [1, 9, 17, 32, 33, 70, 130, 300])
@pytest.mark.parametrize(("out", "columns"), [(1024, 2048), (96, 2064), (16, 14336)])
def test_rows_of_integers_meet_weights_of_integers(count: int, out: int, columns: int) -> None:
    weight = by_row(torch.randn(out, columns, device=DEVICE) * columns**-0.5)
    x = rows_of(count, columns, torch.bfloat16)
    scales = x.float().abs().amax(1, keepdim=True) / 127
    seen = (x.float() / scales).round() * scales
    found = TritonOps(DEVICE, torch.bfloat16).linear(weight)(x)
    assert relative_error(found, seen @ weight.dequantized().T) < 4e-3


@NEEDS_INSTRUCTIONS
def test_a_model_with_a_format_of_its_own_in_every_linear_equals_the_reference() -> None:
    """Chunks and decodes together, so that few rows and many meet every format."""
    config = ModelConfig("llama", 256, 128, 192, 4, 4, 2, 32, 256)
    dtype = list(TOLERANCES)[-1]
    quants: tuple[Quant, ...] = ("int4", "int8", "w8a8", "none")

    def mixed(weight: Weight) -> Weight:  # layers are loaded in any order: which format it is, the numbers say
        return to_quant(quants[int(plain(weight).float().abs().sum()) % 4], weight)

    found: list[Tensor] = []
    for ops in (TritonOps(DEVICE, dtype), ReferenceOps(DEVICE)):
        model = random_model(config, ops, quantize=mixed)
        kv = ops.allocate_kv(KVShape(4, 12, 16, 2, 32))
        first, second = PagedSequence(list(range(60)), [3, 7, 1, 9]), PagedSequence(list(range(90, 140)), [8, 2, 4, 6])
        rows = []
        for counts in [(30, 0), (1, 20), (1, 1), (7, 1)]:
            work = [(s, count) for s, count in zip((first, second), counts, strict=True) if count]
            with torch.inference_mode():
                rows.append(model(make_batch(work, device=DEVICE), kv))
            for sequence, count in work:
                sequence.computed += count
        found.append(torch.cat(rows))
    assert relative_error(*found) < 0.03
