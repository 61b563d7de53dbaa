"""The C kernels against the torch reference, and the property they exist for: a row's result is the same to the bit
whatever it was computed with."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.core.errors import ModelUnsupported
from penstock.core.model_config import ModelConfig
from penstock.model.ops import AttentionSpec, KVShape, Norm, Ops, Rope, Stream
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.library import ARITHMETICS
from penstock.model.ops.native import NativeOps
from penstock.model.ops.reference import ReferenceOps
from penstock.model.rope import rope_tables
from tests.examples import examples
from tests.model.ops.residency import resident_bytes
from tests.model.paged import PagedSequence, make_batch


@lru_cache
def native(arithmetic: str, threads: int = 2) -> NativeOps:
    return NativeOps(arithmetic, threads=threads)


@lru_cache
def unavailable(arithmetic: str) -> str | None:
    """Why this machine cannot run it."""
    try:
        native(arithmetic)
    except KernelsUnavailable as reason:
        return str(reason)
    return None


@pytest.fixture(params=list(ARITHMETICS))
def ops(request: pytest.FixtureRequest) -> NativeOps:
    if reason := unavailable(request.param):
        pytest.skip(reason)
    torch.manual_seed(0)
    return native(request.param)


@pytest.fixture
def float32_ops() -> NativeOps:
    if reason := unavailable("float32"):
        pytest.skip(reason)
    return native("float32")


def stored(ops: NativeOps, tensor: Tensor) -> Tensor:
    return tensor.to(ops.weight_dtype).float()


# -- linear -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "n", "k"), [(1, 576, 960), (8, 100, 33), (13, 31, 64), (100, 48, 1024), (129, 16, 5)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_is_torch_s(ops: NativeOps, m: int, n: int, k: int, has_bias: bool) -> None:
    weight, x, bias = torch.randn(n, k) * k**-0.5, torch.randn(m, k), torch.randn(n) if has_bias else None
    if list(ARITHMETICS)[ops.arithmetic] == "bfloat16_dot":
        x = x.bfloat16().float()  # what the instruction sees
    expected = F.linear(x.double(), stored(ops, weight).double(), None if bias is None else bias.double())
    torch.testing.assert_close(ops.linear(weight, bias)(x).double(), expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=examples(15))
@given(
    arithmetic=st.sampled_from(list(ARITHMETICS)),
    m=st.integers(1, 200),
    n=st.integers(1, 100),
    k=st.integers(1, 300),
    start=st.integers(0, 199),
    count=st.integers(1, 200),
)
def test_rows_of_a_linear_do_not_depend_on_the_rows_beside_them(
    arithmetic: str, m: int, n: int, k: int, start: int, count: int
) -> None:
    assume(not unavailable(arithmetic))
    x, weight = torch.randn(m, k), torch.randn(n, k)
    whole = native(arithmetic).linear(weight)(x)
    part = native(arithmetic, threads=1).linear(weight)(x[start % m : start % m + count])
    assert torch.equal(whole[start % m : start % m + count], part)


def test_tied_embedding_reads_the_head_s_rows(ops: NativeOps) -> None:
    table = torch.randn(50, 33)
    embedding, head = ops.tied(table)
    ids = torch.tensor([0, 49, 17, 17, 3], dtype=torch.int32)
    assert torch.equal(embedding(ids), stored(ops, table)[ids])
    assert torch.equal(ops.embedding(table)(ids), stored(ops, table)[ids])
    x = torch.randn(3, 33)
    assert torch.equal(head(x), ops.linear(table)(x))


def test_several_threads_may_pack_at_the_same_time(ops: NativeOps) -> None:
    weights = [torch.randn(64, 64) for _ in range(16)]
    with ThreadPoolExecutor(4) as pool:
        linears = list(pool.map(ops.linear, weights))
    x = torch.randn(2, 64)
    for linear, weight in zip(linears, weights, strict=True):
        assert torch.equal(linear(x), ops.linear(weight)(x))


# -- rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "n"), [(1, 576), (3, 37), (70, 512)])
def test_norms_and_swiglu_are_those_of_the_reference(float32_ops: NativeOps, m: int, n: int) -> None:
    ops, reference = float32_ops, ReferenceOps()
    x, residual, weight = torch.randn(m, n), torch.randn(m, n), torch.randn(n)
    norm = Norm(weight, 1e-5)
    torch.testing.assert_close(ops.rms_norm(Stream(x), norm), reference.rms_norm(x, weight, 1e-5))
    stream = Stream(residual.clone(), pending=x)
    torch.testing.assert_close(ops.rms_norm(stream, norm), reference.rms_norm(residual + x, weight, 1e-5))
    assert torch.equal(stream.residual, residual + x)
    assert stream.pending is None
    gate_up = torch.cat((torch.linspace(-120, 120, m * n).view(m, n), x), dim=1)
    torch.testing.assert_close(ops.silu_mul(gate_up), reference.silu_mul(gate_up))
    torch.testing.assert_close(ops.gated(gate_up, "gelu"), reference.gated(gate_up, "gelu"), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ops.capped(gate_up.clone(), 30.0), reference.capped(gate_up, 30.0), atol=1e-5, rtol=0)


# -- attention ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    block_size: int = 16
    window: int | None = None
    has_norms: bool = False
    cap: float | None = None
    in_chunks: bool = False
    value_dim: int | None = None  # values are a part of keys

    def spec(self) -> AttentionSpec:
        torch.manual_seed(self.dim)
        q_norm, k_norm = (torch.rand(2, self.dim) + 0.5).unbind() if self.has_norms else (None, None)
        return AttentionSpec(
            self.heads,
            self.kv_heads,
            self.dim,
            self.dim**-0.5,
            self.window,
            q_norm,
            k_norm,
            cap=self.cap,
            value_dim=self.value_dim,
            in_chunks=self.in_chunks,
        )

    def rope(self) -> Rope:
        rotated = self.dim - (self.value_dim or 0)
        config = ModelConfig("llama", 1, 1, 1, 1, self.heads, self.kv_heads, rotated, 2048)
        return rope_tables(config, torch.device("cpu"))

    def random_qkv(self, tokens: int) -> Tensor:
        own = 2 if self.value_dim is None else 1
        return torch.randn(tokens, (self.heads + own * self.kv_heads) * self.dim)

    def kv(self, num_blocks: int) -> KVShape:
        return KVShape(1, num_blocks, self.block_size, self.kv_heads, self.dim, value_dim=self.value_dim)


class Attention:
    """One layer's attention over one cache; sequences come in pieces."""

    def __init__(self, ops: Ops, shape: Shape, num_blocks: int) -> None:
        self.ops, self.shape, self.spec, self.rope = ops, shape, shape.spec(), shape.rope()
        self.kv = ops.allocate_kv(shape.kv(num_blocks))[0]
        generator = torch.Generator().manual_seed(1)
        self._free = torch.randperm(num_blocks, generator=generator).tolist()

    def step(self, work: Sequence[tuple[PagedSequence, Tensor]]) -> list[Tensor]:
        """The next rows of some sequences; each one's output."""
        for sequence, qkv in work:
            while len(sequence.blocks) * self.shape.block_size < sequence.computed + len(qkv):
                sequence.blocks.append(self._free.pop())
        batch = make_batch([(sequence, len(qkv)) for sequence, qkv in work])
        self.ops.begin(batch)
        out = self.ops.attention(torch.cat([qkv for _, qkv in work]), self.spec, self.rope, self.kv, batch)
        for sequence, qkv in work:
            sequence.computed += len(qkv)
        return list(torch.split(out, [len(qkv) for _, qkv in work]))


def new_sequence(length: int) -> PagedSequence:
    return PagedSequence([0] * length)


SHAPES = [
    Shape(9, 3, 64),
    Shape(4, 4, 128, block_size=4),
    Shape(16, 8, 128, block_size=32, has_norms=True),
    Shape(6, 2, 24, window=40),
    Shape(14, 2, 64, block_size=5, window=300),
    Shape(32, 1, 80, block_size=1, has_norms=True),
    Shape(2, 1, 256, block_size=24),
    Shape(8, 4, 32, window=200, cap=1.5),
    Shape(8, 2, 32, window=70, in_chunks=True),
    Shape(5, 1, 40, value_dim=24),
    Shape(16, 1, 576, block_size=32, value_dim=512),
    Shape(14, 1, 72, block_size=5, value_dim=56),
]


def prefill_and_decode(ops: Ops, shape: Shape) -> Tensor:
    torch.manual_seed(0)
    lengths = (300, 1, 33)
    qkvs = [shape.random_qkv(length) for length in lengths]
    attention = Attention(ops, shape, num_blocks=400)
    sequences = [new_sequence(length) for length in lengths]
    outputs = attention.step([(sequences[0], qkvs[0][:250]), (sequences[2], qkvs[2])])
    outputs += attention.step([(sequences[1], qkvs[1]), (sequences[0], qkvs[0][250:299])])
    return torch.cat(outputs + attention.step([(sequences[0], qkvs[0][299:])]))


@lru_cache
def expected_of(shape: Shape) -> Tensor:
    return prefill_and_decode(ReferenceOps(), shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_the_reference_s(ops: NativeOps, shape: Shape) -> None:
    tolerance = 1e-5 if ops.weight_dtype is torch.float32 else 0.04
    torch.testing.assert_close(prefill_and_decode(ops, shape), expected_of(shape), atol=tolerance, rtol=tolerance)


@settings(max_examples=examples(15))
@given(
    arithmetic=st.sampled_from(list(ARITHMETICS)),
    shape=st.sampled_from(SHAPES),
    counts=st.lists(st.lists(st.integers(1, 150), min_size=1, max_size=4), min_size=1, max_size=3),
    threads=st.sampled_from((1, 2, 3)),
    data=st.data(),
)
def test_attention_of_a_row_does_not_depend_on_how_it_was_batched(
    arithmetic: str, shape: Shape, counts: list[list[int]], threads: int, data: st.DataObject
) -> None:
    assume(not unavailable(arithmetic))
    qkvs = [shape.random_qkv(sum(pieces)) for pieces in counts]
    together = Attention(native(arithmetic, threads), shape, num_blocks=5000)
    sequences = [new_sequence(len(qkv)) for qkv in qkvs]
    outputs: list[list[Tensor]] = [[] for _ in counts]
    while any(counts):
        chosen = data.draw(
            st.lists(st.sampled_from([s for s, left in enumerate(counts) if left]), min_size=1, unique=True)
        )
        pieces = [qkvs[s][sequences[s].computed :][: counts[s].pop()] for s in chosen]
        for s, out in zip(
            chosen, together.step([(sequences[s], p) for s, p in zip(chosen, pieces, strict=True)]), strict=True
        ):
            outputs[s].append(out)
    alone = Attention(native(arithmetic), shape, num_blocks=5000)
    for qkv, parts in zip(qkvs, outputs, strict=True):
        assert torch.equal(torch.cat(parts), alone.step([(new_sequence(len(qkv)), qkv)])[0])


@pytest.mark.parametrize("shape", [Shape(4, 2, 64), Shape(4, 1, 64, value_dim=48)], ids=["own", "part of keys"])
def test_what_a_block_s_former_owner_left_is_not_seen(ops: NativeOps, shape: Shape) -> None:
    qkv = shape.random_qkv(21)
    clean, soiled = Attention(ops, shape, 8), Attention(ops, shape, 8)
    for cache in soiled.kv.caches:
        cache.fill_(0xFF)  # NaN in every format
    sequences = new_sequence(21), new_sequence(21)
    for piece in (qkv[:20], qkv[20:]):
        expected = clean.step([(sequences[0], piece)])[0]
        assert torch.equal(soiled.step([(sequences[1], piece)])[0], expected)


def test_copied_blocks_appear_in_every_layer_and_nowhere_else(ops: NativeOps) -> None:
    kv = ops.allocate_kv(KVShape(num_layers=2, num_blocks=5, block_size=4, num_kv_heads=2, head_dim=8))
    for layer in kv:
        layer.keys.random_()
        layer.own_values.random_()
    before = [(layer.keys.clone(), layer.own_values.clone()) for layer in kv]
    ops.copy_blocks(kv, [(0, 3), (4, 1)])
    ops.copy_blocks(kv, [])
    for layer, (keys, values) in zip(kv, before, strict=True):
        assert torch.equal(layer.keys, keys[[0, 4, 2, 0, 4]])
        assert torch.equal(layer.own_values, values[[0, 4, 2, 0, 4]])


def test_untouched_blocks_cost_no_memory(float32_ops: NativeOps) -> None:
    kv = float32_ops.allocate_kv(KVShape(num_layers=4, num_blocks=10_000, block_size=16, num_kv_heads=4, head_dim=64))
    assert sum(cache.numel() for layer in kv for cache in layer.caches) > 1 << 30
    assert sum(resident_bytes(cache) for layer in kv for cache in layer.caches) == 0


def test_head_size_that_kernels_cannot_do_is_refused(float32_ops: NativeOps) -> None:
    with pytest.raises(ModelUnsupported, match="head size 36"):
        float32_ops.allocate_kv(KVShape(1, 1, 16, 1, 36))


def test_values_that_are_a_part_of_keys_take_no_memory_and_are_not_kept_in_int8(float32_ops: NativeOps) -> None:
    shape = Shape(4, 1, 576, value_dim=512).kv(num_blocks=3)
    (layer,) = float32_ops.allocate_kv(shape)
    assert layer.values is None
    assert sum(cache.numel() for cache in layer.caches) == 3 * shape.block_bytes(4) == 3 * 16 * 576 * 4
    with pytest.raises(ModelUnsupported, match="int8"):
        NativeOps("float32", threads=1, kv_dtype=torch.int8).allocate_kv(shape)
