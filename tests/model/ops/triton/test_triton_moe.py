"""A layer's experts on a GPU equal the reference's: every format, however unevenly rows are spread over them; or on no
GPU, interpreted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import product
from typing import Any, Literal, TypeVar

import pytest
import torch
from torch import Tensor

from penstock.core.errors import ModelCorrupt
from penstock.core.expert_placement import balanced_placement
from penstock.core.model_config import Activation, ClampedSwiGLU
from penstock.model.batch import Batch
from penstock.model.expert_layers import places_of
from penstock.model.ops import ExpertWeights
from penstock.model.ops.experts import ExpertMap, HostExperts, add_shared, route
from penstock.model.ops.reference import ReferenceOps
from penstock.model.ops.triton import TritonOps
from penstock.model.ops.triton.moe import routing
from penstock.model.ops.triton.moe.experts import GroupedExperts
from penstock.model.ops.triton.moe.grouped_gemm import Stack
from penstock.model.ops.triton.moe.w4a16_experts import PackedStack
from penstock.model.quantized import Weight, plain
from penstock.model.quantized.grouped import GroupedWeight
from penstock.model.quantized.mxfp4 import Mxfp4Weight
from penstock.model.quantized.row_scaled import RowScaled
from penstock.quant import Quant, mxfp4, to_quant
from penstock.quant.e4m3 import quantized
from tests.devices import (
    DEVICE,
    IS_INTERPRETED,
    NEEDS_BFLOAT16,
    NEEDS_FP8,
    NEEDS_GPU,
    NEEDS_SPEED,
    SLOW_INTERPRETED,
    matrix,
    slow,
)
from tests.model.ops.low_bit import grouped, per_channel

# Of what is added up, relative to all of it.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
ROUNDED_ROWS = {"fp8": 8e-2, "w8a8": 2.5e-2}  # many rows are in the weights' own format
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16
Stored = TypeVar("Stored", bound=GroupedWeight | RowScaled)
Spread = Literal["even", "one", "ragged"]


def weights_of(count: int, hidden: int, ffn: int) -> list[tuple[Tensor, Tensor]]:
    dice = torch.Generator().manual_seed(count)
    return [
        (
            torch.randn(2 * ffn, hidden, generator=dice) * hidden**-0.5,
            torch.randn(hidden, ffn, generator=dice) * ffn**-0.5,
        )
        for _ in range(count)
    ]


def choices(tokens: int, count: int, per_token: int, spread: Spread) -> tuple[Tensor, Tensor]:
    """Who chose whom: anybody; all the same few; or mostly the first ones, and nobody the last."""
    dice = torch.Generator().manual_seed(tokens)
    noise = torch.rand(tokens, count, generator=dice)
    if spread == "one":
        noise = noise[:1].expand(tokens, -1)
    if spread == "ragged":
        noise = noise + 0.4 * torch.arange(count, 0, -1)
        noise[:, -1] = -1.0
    ids = noise.topk(per_token, dim=1).indices[:, torch.randperm(per_token, generator=dice)]
    return ids.to(DEVICE), torch.rand(tokens, per_token, generator=dice).to(DEVICE)


def each_of(pairs: Sequence[tuple[Weight, Weight]], *, has_biases: bool = False) -> Iterator[ExpertWeights]:
    return (ExpertWeights(*pair, *(biases_of(pair, i) if has_biases else ())) for i, pair in enumerate(pairs))


def biases_of(pair: tuple[Weight, Weight], expert: int) -> tuple[Tensor, Tensor]:
    """Numbers that any float type has."""
    dice = torch.Generator().manual_seed(expert)
    up, down = (torch.randint(-16, 17, weight.shape[:1], generator=dice).to(DEVICE) / 8.0 for weight in pair)
    return up, down


def expected(
    pairs: Sequence[tuple[Weight, Weight]],
    x: Tensor,
    ids: Tensor,
    shares: Tensor,
    *,
    has_biases: bool = False,
    activation: Activation = "silu",
) -> Tensor:
    wide = (
        each._replace(gate_up=plain(each.gate_up).float(), down=plain(each.down).float())
        for each in each_of(pairs, has_biases=has_biases)
    )
    return HostExperts.of(ReferenceOps(DEVICE), wide, activation)(x.float(), ids.long(), shares)


def error(ours: Tensor, theirs: Tensor) -> float:
    assert ours.isfinite().all()
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def rows_of(tokens: int, hidden: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(tokens)).to(DEVICE, dtype)


def check(
    pairs: Sequence[tuple[Weight, Weight]],
    tokens: int,
    per_token: int,
    dtype: torch.dtype,
    spread: Spread,
    tolerance: float | None = None,
    *,
    has_biases: bool = False,
    activation: Activation = "silu",
) -> None:
    each, hidden = each_of(pairs, has_biases=has_biases), pairs[0][0].shape[1]
    ours = TritonOps(DEVICE, dtype).experts(len(pairs), each, activation=activation)
    x, (ids, shares) = rows_of(tokens, hidden, dtype), choices(tokens, len(pairs), per_token, spread)
    theirs = expected(pairs, x, ids, shares, has_biases=has_biases, activation=activation)
    assert error(ours(x, ids, shares), theirs) < (tolerance or TOLERANCES[dtype])


SPREADS = [
    (1, "even"),
    (2, "one"),
    (9, "even"),
    (16, "ragged"),
    (17, "one"),
    (40, "ragged"),
    (70, "even"),
    (200, "one"),
]
# Interpreted: few rows and many, sorted by their experts or not.
CHOICES = matrix(
    list(product(TOLERANCES, SPREADS)),
    [
        (torch.float16, (2, "one")),
        (torch.float32, (17, "one")),
        (torch.float16, (40, "ragged")),
        slow(torch.float32, (2, "one")),
        slow(torch.float16, (16, "ragged")),
        slow(torch.float32, (200, "one")),
    ],
)


@SLOW_INTERPRETED
@pytest.mark.parametrize(("dtype", "choice"), CHOICES, ids=str)
def test_each_row_gets_the_sum_of_its_own_experts(dtype: torch.dtype, choice: tuple[int, Spread]) -> None:
    check(weights_of(6, 64, 48), choice[0], 3, dtype, choice[1])


@pytest.mark.parametrize(
    ("dtype", "tokens"),
    matrix(
        list(product(TOLERANCES, [1, 2, 9, 16, 17, 40, 200, 1500])),
        [(torch.float16, 1), (torch.float16, 9), (torch.float32, 40), slow(torch.float16, 200)],
    ),
)
def test_experts_that_are_elsewhere_add_nothing(dtype: torch.dtype, tokens: int) -> None:
    """Of six, this rank has the middle three; some tokens have chosen none of them. Memory that nobody has written is
    full of NaN, so that it shows when it is read."""
    pairs, here = weights_of(6, 64, 48), range(2, 5)
    ours = TritonOps(DEVICE, dtype).experts(3, each_of(pairs[2:5]), is_part=True)
    x, (ids, shares) = rows_of(tokens, 64, dtype), choices(tokens, 6, 2, "even")
    is_here = (ids >= here.start) & (ids < here.stop)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        found = ours(x, torch.where(is_here, ids - here.start, -1), shares * is_here)
    finally:
        torch.use_deterministic_algorithms(False)
    whole = expected(pairs, x, ids, shares * is_here)
    assert found.isfinite().all()
    assert float((found.double() - whole.double()).norm()) <= TOLERANCES[dtype] * max(1.0, float(whole.norm()))


@pytest.mark.parametrize("per_token", matrix([2, 4], [slow(2), slow(4)]))
def test_a_few_tokens_that_hardly_share_experts(per_token: int) -> None:
    for tokens in matrix([1, 3], [2]):
        check(weights_of(48, 64, 128), tokens, per_token, HALF, "even")
        check(
            [*on_device([(per_channel(up), per_channel(down)) for up, down in weights_of(48, 64, 128)])],
            tokens,
            per_token,
            HALF,
            "even",
        )


@pytest.mark.parametrize("per_token", matrix([1, 2, 4], [1, slow(4)]))
def test_sizes_that_no_tile_divides(per_token: int) -> None:
    for tokens in matrix([3, 33], [3]):
        check(weights_of(5, 72, 40), tokens, per_token, torch.float16, "even")


@pytest.mark.parametrize("tokens", matrix([1, 12, 40, 200], [1, slow(40), slow(200)]))
def test_integers_with_a_scale_per_output(tokens: int) -> None:
    pairs = [(per_channel(gate_up), per_channel(down)) for gate_up, down in weights_of(6, 64, 48)]
    check(on_device(pairs), tokens, 2, HALF, "ragged", ROUNDED_ROWS["w8a8"] if tokens > routing.FEW else None)


@NEEDS_FP8
@pytest.mark.parametrize("tokens", [1, 12, 40, 200])
def test_fp8(tokens: int) -> None:
    pairs = [(quantized(gate_up), quantized(down)) for gate_up, down in weights_of(6, 64, 48)]
    check(on_device(pairs), tokens, 2, torch.bfloat16, "ragged", ROUNDED_ROWS["fp8"] if tokens > routing.FEW else None)


# What gpt-oss brings: gates that are clamped, some of them, and biases.
GPT_OSS: dict[str, Any] = {"has_biases": True, "activation": ClampedSwiGLU(limit=1.5)}


@pytest.mark.parametrize(
    ("dtype", "tokens"),
    matrix(
        list(product(TOLERANCES, [1, 3, 12, 40, 200])),
        [(HALF, 1), slow(HALF, 12), slow(torch.float32, 40), slow(HALF, 40), slow(HALF, 200)],
    ),
)
def test_biases_and_clamped_gates(dtype: torch.dtype, tokens: int) -> None:
    check(weights_of(6, 64, 48), tokens, 3, dtype, "ragged", **GPT_OSS)


@SLOW_INTERPRETED
def test_biases_where_a_token_sums_up_its_own_experts() -> None:
    for tokens in matrix([1, 3], [2]):
        check(weights_of(48, 64, 128), tokens, 4, HALF, "even", **GPT_OSS)


@pytest.mark.parametrize("tokens", matrix([1, 12, 40, 200], [slow(1), slow(40)]))
def test_biases_beside_integers(tokens: int) -> None:
    rows = on_device([(per_channel(up), per_channel(down)) for up, down in weights_of(6, 64, 48)])
    tolerance = ROUNDED_ROWS["w8a8"] if tokens > routing.FEW else None
    check(rows, tokens, 2, HALF, "ragged", tolerance, **GPT_OSS)
    check(integers(4, 128, "zeros"), tokens, 2, HALF, "ragged", **GPT_OSS)


def in_mxfp4(count: int, hidden: int, ffn: int) -> list[tuple[Mxfp4Weight, Mxfp4Weight]]:
    return [
        (mxfp4.quantized(up.to(DEVICE)), mxfp4.quantized(down.to(DEVICE)))
        for up, down in weights_of(count, hidden, ffn)
    ]


@pytest.mark.parametrize(
    ("dtype", "tokens"),
    matrix(
        list(product([torch.float16, torch.bfloat16], [1, 3, 9, 16, 17, 40, 200, 1500])),
        [(torch.float16, 1), *(slow(torch.float16, tokens) for tokens in (12, 40, 200))],
    ),
)
def test_mxfp4(dtype: torch.dtype, tokens: int) -> None:
    """Sizes that are no whole chunks of 128 columns, as gpt-oss's 2,880 are not."""
    check(in_mxfp4(4, 160, 96), tokens, 2, dtype, "ragged", **GPT_OSS)


def test_mxfp4_keeps_its_bits() -> None:
    made = TritonOps(DEVICE, torch.bfloat16).experts(2, each_of(in_mxfp4(2, 256, 128)))
    assert isinstance(made, GroupedExperts)
    assert isinstance(made.down, PackedStack)
    assert made.down.num_bytes == 2 * 256 * 128 * 4.25 / 8
    wide = TritonOps(DEVICE, torch.float32).experts(2, each_of(in_mxfp4(2, 256, 128)))
    assert isinstance(wide, GroupedExperts)
    assert isinstance(wide.down, Stack), "there are no kernels for it in float32"


GROUPED = [slow(4, "zeros", 1), slow(8, "minimums", 40), slow(8, "minimums", 1), slow(4, "zeros", 40)]


@pytest.mark.parametrize(
    ("bits", "kind", "tokens"),
    matrix([(*each, tokens) for each in [(4, "zeros"), (8, "minimums")] for tokens in (1, 12, 40, 200)], GROUPED),
)
def test_integers_in_groups(bits: Literal[4, 8], kind: str, tokens: int) -> None:
    check(integers(bits, 128, kind), tokens, 2, HALF, "ragged")


@NEEDS_BFLOAT16
@pytest.mark.parametrize(("bits", "kind"), [(4, "symmetric"), (4, "minimums"), (8, "symmetric"), (8, "zeros")])
def test_every_kind_of_integers(bits: Literal[4, 8], kind: str) -> None:
    for tokens in (3, 60):
        check(integers(bits, 128, kind), tokens, 2, torch.bfloat16, "even")


@SLOW_INTERPRETED
@pytest.mark.parametrize("bits", [4, 8])
def test_small_groups_too(bits: Literal[4, 8]) -> None:
    for tokens in matrix([5, 40], [2]):
        check(integers(bits, 32, "zeros"), tokens, 2, HALF, "ragged")


@pytest.mark.parametrize("tokens", matrix([3, 40], [slow(3), slow(40)]))
def test_columns_may_lie_in_an_order_of_each_experts_own(tokens: int) -> None:
    def shuffled(weight: GroupedWeight, seed: int) -> GroupedWeight:
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        return GroupedWeight(weight.values, weight.bits, weight.scales, order=order)

    pairs = [(shuffled(up, i), shuffled(down, -i)) for i, (up, down) in enumerate(integers(4, 128, "symmetric"))]
    check(pairs, tokens, 2, HALF, "even")


def integers(bits: Literal[4, 8], size: int, kind: str) -> list[tuple[GroupedWeight, GroupedWeight]]:
    def small(weight: Tensor) -> GroupedWeight:
        return grouped(weight, bits, size, has_zeros=kind == "zeros", has_minimums=kind == "minimums")

    return on_device([(small(gate_up), small(down)) for gate_up, down in weights_of(4, matrix([256], [128])[0], 128)])


def on_device(pairs: list[tuple[Stored, Stored]]) -> list[tuple[Stored, Stored]]:
    def moved(weight: Stored) -> Stored:
        found = {each.name: getattr(weight, each.name) for each in fields(weight)}
        tensors: dict[str, Any] = {name: each.to(DEVICE) for name, each in found.items() if isinstance(each, Tensor)}
        return replace(weight, **tensors)

    return [(moved(gate_up), moved(down)) for gate_up, down in pairs]


def test_formats_are_kept_as_they_are() -> None:
    ops = TritonOps(DEVICE, torch.float16)
    small = ops.experts(4, each_of(integers(4, 128, "zeros")))
    assert isinstance(small, GroupedExperts)
    assert isinstance(small.gate_up, PackedStack)
    rows = on_device([(per_channel(up), per_channel(down)) for up, down in weights_of(6, 64, 48)])
    by_row = ops.experts(6, each_of(rows))
    assert isinstance(by_row, GroupedExperts)
    assert isinstance(by_row.down, Stack)
    assert by_row.down.values.dtype is torch.int8


def test_experts_of_two_formats_are_refused() -> None:
    first, second = weights_of(2, 64, 48)
    mixed: list[tuple[Weight, Weight]] = [first, *on_device([(per_channel(second[0]), per_channel(second[1]))])]
    with pytest.raises(ModelCorrupt, match="expert 1"):
        TritonOps(DEVICE, torch.float16).experts(2, each_of(mixed))


@pytest.mark.parametrize("tokens", matrix([5, 40], [slow(5), slow(40)]))
def test_a_row_does_not_depend_on_those_beside_it(tokens: int) -> None:
    """In a batch of the same size: what is beside it is somebody else's."""
    ours = TritonOps(DEVICE, HALF).experts(6, each_of(weights_of(6, 64, 48)))
    x, (ids, shares) = rows_of(tokens, 64, HALF), choices(tokens, 6, 2, "ragged")
    before = ours(x, ids, shares)
    others, (other_ids, _) = rows_of(tokens + 1, 64, HALF)[:tokens], choices(tokens, 6, 2, "even")
    others[2], other_ids[2] = x[2], ids[2]
    assert torch.equal(ours(others, other_ids, shares)[2], before[2])


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(
    ("tokens", "count", "per_token"), matrix([(1, 5, 2), (7, 8, 2), (40, 128, 8), (3, 60, 4)], [(1, 5, 2), (3, 60, 4)])
)
def test_routers_choose_as_torch_does(tokens: int, count: int, per_token: int, normalized: bool) -> None:
    logits = torch.randn(tokens, count, generator=torch.Generator().manual_seed(tokens)).to(DEVICE)
    ids, shares = routing.topk(logits, per_token, normalized=normalized)
    their_ids, their_shares = route(logits, per_token, normalized=normalized)
    assert ids.tolist() == their_ids.tolist()
    torch.testing.assert_close(shares, their_shares)


def batch_of(tokens: int, *, padding: int = 0) -> Batch:
    """Single tokens, of which the last pad a captured step."""
    dice = torch.Generator().manual_seed(tokens)
    ints = {"dtype": torch.int32, "device": DEVICE}
    contexts = torch.tensor([5] * (tokens - padding) + [0] * padding, **ints)  # type: ignore[arg-type]
    ids, positions = torch.randint(0, 50_000, (2, tokens), generator=dice).to(**ints)  # type: ignore[call-overload]
    starts, tables = torch.arange(tokens + 1).to(**ints), torch.zeros(tokens, 1).to(**ints)  # type: ignore[call-overload]
    return Batch(ids, positions, starts, contexts, tables, starts[:-1].long(), tokens)


@pytest.mark.parametrize("redundant", [0, 1])
def test_routers_look_experts_up_and_count_them_as_the_reference_does(redundant: int) -> None:
    """Tokens that pad a captured step are not counted."""
    tokens, count, num_ranks = 9, 6, 2
    logits = torch.randn(tokens, count, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    placement = balanced_placement([90, 2, 30, 4, 5, 1], num_ranks, redundant)
    num_copies = num_ranks if redundant else 1
    batch, total = batch_of(tokens), 0
    for rank in range(num_ranks):
        places = places_of(placement, rank, count, num_copies).to(DEVICE)
        ours, theirs = (
            ExpertMap(torch.zeros(count, num_copies, dtype=torch.int64, device=DEVICE), places) for _ in range(2)
        )
        ids, shares = routing.topk(logits, 2, normalized=True, experts=ours, batch=batch)
        their_ids, their_shares = route(logits, 2, normalized=True, experts=theirs, batch=batch)
        assert ids.tolist() == their_ids.tolist()
        torch.testing.assert_close(shares, their_shares)
        assert ours.counts.tolist() == theirs.counts.tolist()
        total += int((ids >= 0).sum())
        routing.topk(logits, 2, normalized=True, experts=ours, batch=batch_of(tokens, padding=4))
        assert int(ours.counts.sum()) == 2 * (tokens + tokens - 4)
    assert total == 2 * tokens, "each token goes to exactly one copy"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "int4", "mxfp4"])
def test_another_expert_takes_a_slot(name: Quant) -> None:
    """At the same addresses: a captured graph goes on with it."""
    wide = [(gate_up.to(DEVICE), down.to(DEVICE)) for gate_up, down in weights_of(4, 128, 128)]
    pairs = [(to_quant(name, gate_up), to_quant(name, down)) for gate_up, down in wide]
    ours = TritonOps(DEVICE, HALF).experts(4, each_of(pairs[:2], has_biases=True))
    assert isinstance(ours, GroupedExperts)
    before = ours.gate_up.values.data_ptr()
    x, (ids, shares) = rows_of(3, 128, HALF), choices(3, 2, 2, "even")
    ours.put(1, ExpertWeights(*pairs[3], *biases_of(pairs[3], 1)))
    assert ours.gate_up.values.data_ptr() == before
    placed = [pairs[0], pairs[3]]
    theirs = expected(placed, x, ids, shares, has_biases=True)
    assert error(ours(x, ids, shares), theirs) < TOLERANCES[HALF]


def test_the_expert_that_all_tokens_pass_is_added() -> None:
    found, made, logits = rows_of(5, 1100, HALF), rows_of(6, 1100, HALF)[:5], rows_of(5, 1, HALF)
    theirs = add_shared(found.float(), made.float(), logits)
    assert error(routing.add_shared(found, made, logits), theirs) < TOLERANCES[HALF]


@pytest.mark.parametrize("rows", matrix([16, 64], [16]))
@pytest.mark.parametrize("spread", ["even", "one", "ragged"])
def test_every_pair_is_in_one_block_of_its_expert(rows: int, spread: Spread) -> None:
    ids, _ = choices(150, 7, 3, spread)
    blocks = routing.blocks_of(ids, 7, rows)
    assert blocks.table is not None
    assert blocks.order is not None
    order, found = blocks.order.tolist(), []
    for expert, begin, end in blocks.table.tolist():
        assert end - begin <= rows
        assert all(ids.flatten()[pair] == expert for pair in order[begin:end])
        found += order[begin:end]
    assert found == ids.flatten().argsort(stable=True).tolist()


@NEEDS_GPU
@pytest.mark.parametrize("is_mxfp4", [False, True])
@pytest.mark.parametrize("tokens", [1, 16, 24, 300])
def test_a_captured_graph_serves_any_choice(tokens: int, is_mxfp4: bool) -> None:
    pairs: Sequence[tuple[Weight, Weight]] = in_mxfp4(8, 64, 32) if is_mxfp4 else weights_of(8, 64, 48)
    ours, x = TritonOps(DEVICE, torch.bfloat16).experts(8, each_of(pairs)), rows_of(tokens, 64, torch.bfloat16)
    ids, shares = choices(tokens, 8, 2, "one")
    ours(x, ids, shares)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ours(x, ids, shares)
    for spread in ("even", "ragged"):
        ids.copy_(choices(tokens, 8, 2, spread)[0])
        graph.replay()
        assert error(out, expected(pairs, x, ids, shares)) < TOLERANCES[torch.bfloat16]


@NEEDS_SPEED
@pytest.mark.parametrize("quant", ["none", "fp8", "w8a8", "int8", "int4", "mxfp4"])
@pytest.mark.parametrize("tokens", [1, 16, 80, 700])
def test_the_sizes_of_real_models(quant: Quant, tokens: int) -> None:
    wide = [(gate_up.to(DEVICE), down.to(DEVICE)) for gate_up, down in weights_of(16, 2048, 768)]
    pairs = [(to_quant(quant, gate_up), to_quant(quant, down)) for gate_up, down in wide]
    check(pairs, tokens, 8, torch.bfloat16, "even", ROUNDED_ROWS.get(quant) if tokens > routing.FEW else None)


@NEEDS_SPEED
def test_many_rows_of_long_experts() -> None:
    check(weights_of(4, 64, 4608), 600, 2, torch.bfloat16, "ragged")


@SLOW_INTERPRETED
@pytest.mark.parametrize("tokens", matrix([3, 20], [3, slow(20)]))
def test_a_row_of_nan_is_its_own_affair(tokens: int) -> None:
    logits = rows_of(tokens, 6, torch.float32)
    logits[1] = torch.nan
    ids, shares = routing.topk(logits, 2, normalized=True)
    assert int(ids.min()) >= 0
    assert int(ids.max()) < 6
    pairs, x = weights_of(6, 64, 48), rows_of(tokens, 64, HALF)
    found = TritonOps(DEVICE, HALF).experts(6, each_of(pairs))(x, ids, shares)
    others = torch.arange(tokens, device=DEVICE) != 1
    assert found[1].isnan().all()
    assert error(found[others], expected(pairs, x[others], ids[others], shares[others])) < TOLERANCES[HALF]
