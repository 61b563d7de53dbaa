"""Attention over a paged cache: decodes, decodes that share a prefix, and prefill."""

from __future__ import annotations

from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.model.batch import Batch, SharedPrefixes
from penstock.model.ops import AttentionSpec, KVShape, LayerKV, Rope
from penstock.model.ops.triton import TritonOps
from penstock.model.ops.triton.attention import decode, decode_plan, prefill
from penstock.model.ops.triton.attention.shared_prefix import pieces_wanted, sequences_per_tile
from penstock.model.ops.triton.common.tiling import Tiling
from penstock.runner.sharing import Room, SharedViews, find_groups, write_shared

from .timing import DTYPE, FP8, MODELS, TIMED, bandwidth, each_us, graph_us, randn, throughput, tried


@dataclass
class Case:
    """Sequences of (tokens computed, tokens to come) for a stack of attention layers."""

    model: str
    lengths: list[tuple[int, int]]
    block_size: int = 64
    layers: int = 16
    kv_dtype: torch.dtype = DTYPE
    prefix: int = 0  # tokens that all sequences have in common: whole blocks

    def __post_init__(self) -> None:
        heads, kv_heads, dim, *_ = MODELS[self.model]
        self.ops = TritonOps("cuda", DTYPE, kv_dtype=self.kv_dtype)
        self.spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5, None)
        angles = torch.outer(torch.arange(40000).float(), 0.9 ** torch.arange(dim // 2).float()).cuda()
        self.rope = Rope(angles.cos(), angles.sin())
        counts = [-(-(computed + new) // self.block_size) for computed, new in self.lengths]
        self.kv = self.ops.allocate_kv(KVShape(self.layers, sum(counts), self.block_size, kv_heads, dim))
        for layer in self.kv:
            layer.keys.copy_(randn(*layer.keys.shape))
            layer.values.copy_(randn(*layer.values.shape))
        ids = torch.randperm(sum(counts)).split(counts)
        tables = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True).int()
        common = self.prefix // self.block_size
        tables[1:, :common] = tables[0, :common]
        new = torch.tensor([n for _, n in self.lengths])
        starts = F.pad(new.cumsum(0), (1, 0)).int().cuda()
        contexts = torch.tensor([computed + n for computed, n in self.lengths]).int().cuda()
        tokens = torch.zeros(int(new.sum()), dtype=torch.int32, device="cuda")
        num_decodes = sum(n == 1 for _, n in self.lengths)
        self.batch = Batch(tokens, tokens, starts, contexts, tables.cuda(), starts[1:].long() - 1, num_decodes)
        self.qkv = randn(self.layers, len(tokens), (heads + 2 * kv_heads) * dim)

    def share(self) -> None:
        """Lets the prefix be attended once for all from now on, whether it pays or not."""
        heads, kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        tile, wanted = sequences_per_tile(heads, kv_heads), pieces_wanted(kv_heads, self.ops.device)
        arrays = [np.zeros(size, np.int32) for size in Room(len(self.lengths), tile, wanted).shapes]
        full = (self.batch.context_lens.cpu().numpy() - 1) // self.block_size
        groups = find_groups(self.batch.block_tables.cpu().numpy(), full)
        write_shared(groups, self.block_size, SharedViews(*arrays))
        self.batch = replace(self.batch, shared=SharedPrefixes(*(torch.from_numpy(each).cuda() for each in arrays)))

    @property
    def kv_bytes(self) -> int:
        per_token = self.spec.num_kv_heads * self.spec.head_dim * 2 * self.kv_dtype.itemsize
        return sum(c + n for c, n in self.lengths) * per_token

    @property
    def flops(self) -> float:
        """The operations of one layer, causal: what a query sees."""
        pairs = sum(n * c + n * (n + 1) / 2 for c, n in self.lengths)
        return 4 * pairs * self.spec.num_heads * self.spec.head_dim

    def layer(self, i: int) -> tuple[Tensor, AttentionSpec, Rope, LayerKV, Batch]:
        return self.qkv[i], self.spec, self.rope, self.kv[i], self.batch

    def step_us(self) -> float:
        """A whole layer's attention, the plan shared by all of them."""

        def run() -> None:
            self.ops.begin(self.batch)
            for i in range(self.layers):
                self.ops.attention(*self.layer(i))

        return graph_us(run, self.layers)


def skewed(count: int) -> list[tuple[int, int]]:
    """Contexts as uneven as those of real conversations: most short, some of thousands of tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.exp(torch.randn(count, generator=generator) * 1.1 + 6.4).clamp(16, 7000).int()
    return [(int(length), 1) for length in lengths]


DECODES = {
    "1 x 400": [(399, 1)],
    "8 x 400": [(399, 1)] * 8,
    "1 x 8192": [(8191, 1)],
    "1 x 32768": [(32767, 1)],
    "64 x 640": [(639, 1)] * 64,
    "256 x 640": [(639, 1)] * 256,
    "256 skewed": skewed(256),
}


def decodes() -> None:
    for model in TIMED:
        for name, lengths in DECODES.items():
            case = Case(model, lengths, layers=16 if len(lengths) < 64 else 4)
            print(f"decode {model} {name:11}: {bandwidth(case.kv_bytes, case.step_us())}")


SHARED = [(8, 2048), (16, 1024), (16, 4096), (32, 512), (64, 256), (64, 2048), (256, 128)]  # decodes, common tokens


def shared() -> None:
    """Decodes with a prefix in common and 160 tokens of their own: each attends to all of it, or they share."""
    for kv_dtype in (DTYPE, FP8):
        for model, count, prefix in [*((name, 256, 2048) for name in MODELS), *(("8B", *size) for size in SHARED)]:
            case = Case(model, [(prefix + 160, 1)] * count, layers=8, kv_dtype=kv_dtype, prefix=prefix)
            alone = case.step_us()
            case.share()
            together = case.step_us()
            label = f"{'FP8' if kv_dtype is FP8 else 'bf16'} cache, {model}, {count} x ({prefix} + 160)"
            print(f"{label:36}: alone {alone:7.1f} µs, shared {together:7.1f} µs")


PREFILLS = {
    "1 x 4096": [(0, 4096)],
    "2 x 4096": [(0, 4096)] * 2,
    "16 x 512": [(0, 512)] * 16,
    "64 x 128 on 2048": [(2048, 128)] * 64,
    "1 x 128 on 8192": [(8192, 128)],
    "mixed": [(639, 1)] * 128 + [(0, 512)] * 8,
}


def prefills() -> None:
    for model in TIMED:
        for name, lengths in PREFILLS.items():
            case = Case(model, lengths, layers=4)
            print(f"prefill {model} {name:17}: {throughput(case.flops, case.step_us())}")
        for name in ("1 x 4096", "2 x 4096", "16 x 512"):
            case = Case(model, PREFILLS[name], layers=1)
            for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
                print(f"  torch {backend.name:15} {model} {name}: {tried(sdpa_rate, case, backend)}")


def sdpa_rate(case: Case, backend: SDPBackend) -> str:
    heads, kv_heads, dim, *_ = MODELS[case.model]
    count, length = len(case.lengths), case.lengths[0][1]
    q, k, v = (randn(count, n, length, dim) for n in (heads, kv_heads, kv_heads))

    def attend(_: int) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return throughput(case.flops, each_us(attend, 4))


def sweep_decode() -> None:
    for model in TIMED:
        for block_size, keys in ((16, 16), (32, 32), (64, 32), (64, 64)):
            cases = [Case(model, DECODES["1 x 400"], block_size), Case(model, DECODES["256 x 640"], block_size, 4)]
            for warps, stages in ((4, 2), (4, 3), (4, 4), (8, 3)):
                tiling = Tiling(block_n=keys, num_warps=warps, num_stages=stages)
                rates = "  ".join(tried(decode_rate, case, tiling) for case in cases)
                print(f"{model} block {block_size:3} {tiling} {rates}")


def decode_rate(case: Case, tiling: Tiling) -> str:
    out = randn(len(case.lengths), case.spec.num_heads * case.spec.head_dim)

    def run() -> None:
        plan = decode_plan.plan_decodes(case.batch, case.spec.num_kv_heads, 132)
        for i in range(case.layers):
            decode.attend_decodes(*case.layer(i), plan, out, tiling)

    return bandwidth(case.kv_bytes, graph_us(run, case.layers))


def sweep_plan() -> None:
    cases = {name: Case("8B", lengths, layers=4 if len(lengths) > 8 else 16) for name, lengths in DECODES.items()}
    for programs in (1, 2, 3):
        for chunks in (0.0, 0.5, 0.75, 1.0):
            with patch.multiple(decode_plan, _PROGRAMS_PER_PROCESSOR=programs, _CHUNKS_PER_SEQUENCE=chunks):
                figures = "  ".join(f"{name}: {case.step_us():.1f}" for name, case in cases.items())
            print(f"plan {programs} {chunks}: {figures}")


def sweep_prefill() -> None:
    numbers = [
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 64, 8, 4),
        (128, 128, 8, 2),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (64, 128, 4, 2),
        (128, 32, 8, 4),
        (128, 64, 4, 3),
        (128, 128, 8, 3),
        (256, 64, 8, 3),
    ]
    for model in TIMED:
        cases = [Case(model, PREFILLS[name], 128, 4) for name in ("2 x 4096", "16 x 512", "64 x 128 on 2048")]
        for rows, keys, warps, stages in numbers:
            tiling = Tiling(block_m=rows, block_n=keys, num_warps=warps, num_stages=stages)
            print(f"{model} {tiling} {'  '.join(tried(prefill_rate, case, tiling) for case in cases)}")


def prefill_rate(case: Case, tiling: Tiling) -> str:
    out = randn(case.batch.num_tokens, case.spec.num_heads * case.spec.head_dim)
    us = each_us(lambda i: prefill.attend_chunks(*case.layer(i), out, tiling), case.layers)
    return throughput(case.flops, us)
