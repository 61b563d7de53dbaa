"""Times every kernel of `penstock.model.ops.triton` on a GPU against what the hardware can do. Correctness is pytest's:
tests/model/ops/test_triton.py.

    python tools/gpu_ops.py [small] [decode] [prefill] [sweep-decode] [sweep-plan] [sweep-prefill] [sweep-gemv]

Tilings and plans are fixed in the sources, so that start-up tunes nothing; the sweeps are where they come from.

Every case is a CUDA graph of many layers, each with its own cache and inputs, so that no layer finds the one before in
the L2 cache and launches cost what they cost in a captured step.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.model.batch import Batch
from penstock.model.ops import AttentionSpec, KVShape, LayerKV, Rope
from penstock.model.ops.triton import TritonOps, decode, decode_plan, gemv, prefill

DTYPE = torch.bfloat16
SHAPES = {"8B": (32, 8, 128), "1B": (32, 8, 64)}  # heads, kv heads, head dim


def graph_us(run: Callable[[], object], calls: int) -> float:
    """Microseconds of one of the `calls` that `run` makes: the median of replays of its graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(9):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times) * 1e3 / calls


@dataclass
class Case:
    """Sequences of (tokens computed, tokens to come) for a stack of attention layers."""

    shape: str
    lengths: list[tuple[int, int]]
    block_size: int = 64
    layers: int = 16

    def __post_init__(self) -> None:
        heads, kv_heads, dim = SHAPES[self.shape]
        self.ops = TritonOps("cuda", DTYPE)
        self.spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5, None)
        angles = torch.outer(torch.arange(40000).float(), 0.9 ** torch.arange(dim // 2).float()).cuda()
        self.rope = Rope(angles.cos(), angles.sin())
        counts = [-(-(computed + new) // self.block_size) for computed, new in self.lengths]
        self.kv = self.ops.allocate_kv(KVShape(self.layers, sum(counts), self.block_size, kv_heads, dim))
        for layer in self.kv:
            layer.keys.normal_()
            layer.values.normal_()
        ids = torch.randperm(sum(counts)).split(counts)
        tables = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True).int().cuda()
        new = torch.tensor([n for _, n in self.lengths])
        starts = F.pad(new.cumsum(0), (1, 0)).int().cuda()
        contexts = torch.tensor([computed + n for computed, n in self.lengths]).int().cuda()
        tokens = torch.zeros(int(new.sum()), dtype=torch.int32, device="cuda")
        self.batch = Batch(
            tokens, tokens, starts, contexts, tables, starts[1:].long() - 1, sum(n == 1 for _, n in self.lengths)
        )
        self.qkv = torch.randn(self.layers, len(tokens), (heads + 2 * kv_heads) * dim, device="cuda").to(DTYPE)

    @property
    def kv_bytes(self) -> int:
        return sum(c + n for c, n in self.lengths) * self.spec.num_kv_heads * self.spec.head_dim * 2 * DTYPE.itemsize

    @property
    def flops(self) -> float:
        """Of one layer, causal: what a query sees."""
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


def bandwidth(num_bytes: float, us: float) -> str:
    return f"{us:9.1f} µs {num_bytes / us / 1e6:6.2f} TB/s"


def small() -> None:
    ops = TritonOps("cuda", DTYPE)
    for tokens in (1, 256, 8192):
        for hidden, ffn in ((4096, 14336), (2048, 8192)):
            copies = 2 + int(2e8 // (tokens * ffn * 6))
            copies = min(copies, 64)
            x, residual = torch.randn(2, copies, tokens, hidden, device="cuda").to(DTYPE)
            gate_up = torch.randn(copies, tokens, 2 * ffn, device="cuda").to(DTYPE)
            weight = torch.randn(hidden, device="cuda").to(DTYPE)
            cases: dict[str, tuple[Callable[[int], object], int]] = {
                "rms_norm": (lambda i, x=x, w=weight: ops.rms_norm(x[i], w, 1e-5), 2 * hidden),
                "add_rms_norm": (
                    lambda i, x=x, r=residual, w=weight: ops.add_rms_norm(x[i], r[i], w, 1e-5),
                    4 * hidden,
                ),
                "silu_mul": (lambda i, g=gate_up: ops.silu_mul(g[i]), 3 * ffn),
            }
            for name, (call, numbers) in cases.items():
                us = graph_us(lambda call=call, copies=copies: [call(i) for i in range(copies)], copies)
                print(f"{name:14} {tokens:5} x {hidden}/{ffn}: {bandwidth(tokens * numbers * 2, us)}")


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
    for shape in SHAPES:
        for name, lengths in DECODES.items():
            case = Case(shape, lengths, layers=16 if len(lengths) < 64 else 4)
            print(f"decode {shape} {name:11}: {bandwidth(case.kv_bytes, case.step_us())}")


PREFILLS = {
    "1 x 4096": [(0, 4096)],
    "2 x 4096": [(0, 4096)] * 2,
    "16 x 512": [(0, 512)] * 16,
    "64 x 128 on 2048": [(2048, 128)] * 64,
    "1 x 128 on 8192": [(8192, 128)],
    "mixed": [(639, 1)] * 128 + [(0, 512)] * 8,
}


def prefills() -> None:
    for shape in SHAPES:
        for name, lengths in PREFILLS.items():
            case = Case(shape, lengths, layers=4)
            us = case.step_us()
            print(f"prefill {shape} {name:17}: {us:9.1f} µs {case.flops / us / 1e6:6.0f} TFLOP/s")
        for name, (count, length) in {"1 x 4096": (1, 4096), "2 x 4096": (2, 4096), "16 x 512": (16, 512)}.items():
            flops = Case(shape, [(0, length)] * count, layers=1).flops
            for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
                rate = tried(lambda: f"{flops / sdpa_us(shape, count, length, backend) / 1e6:6.0f} TFLOP/s")  # noqa: B023
                print(f"  torch {backend.name:15} {shape} {name}: {rate}")


def sdpa_us(shape: str, count: int, length: int, backend: SDPBackend) -> float:
    heads, kv_heads, dim = SHAPES[shape]
    q, k, v = (torch.randn(count, n, length, dim, device="cuda").to(DTYPE) for n in (heads, kv_heads, kv_heads))

    def run() -> None:
        with sdpa_kernel(backend):
            for _ in range(4):
                F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return graph_us(run, 4)


def sweep_decode() -> None:
    for shape in SHAPES:
        for block_size, keys in ((16, 16), (32, 32), (64, 32), (64, 64)):
            cases = {
                name: Case(shape, DECODES[name], block_size, 4 if "256" in name else 16)
                for name in ("1 x 400", "256 x 640")
            }
            for warps, stages in ((4, 2), (4, 3), (4, 4), (8, 3)):
                tiling = decode.Tiling(keys, warps, stages)
                print(f"{shape} block {block_size:3} {tiling}", end="")
                for case in cases.values():
                    print(
                        "  ",
                        tried(lambda case=case, tiling=tiling: bandwidth(case.kv_bytes, decode_us(case, tiling))),
                        end="",
                    )
                print()


def decode_us(case: Case, tiling: decode.Tiling) -> float:
    out = torch.empty(len(case.lengths), case.spec.num_heads * case.spec.head_dim, device="cuda", dtype=DTYPE)

    def run() -> None:
        plan = decode_plan.plan_decodes(case.batch, case.spec.num_kv_heads, 132)
        for i in range(case.layers):
            decode.attend_decodes(*case.layer(i), plan, out, tiling)

    return graph_us(run, case.layers)


def sweep_plan() -> None:
    cases = {name: Case("8B", lengths, layers=4 if len(lengths) > 8 else 16) for name, lengths in DECODES.items()}
    for per_processor in (1, 2, 3):
        for per_sequence in (0.0, 0.5, 0.75, 1.0):
            decode_plan._PROGRAMS_PER_PROCESSOR, decode_plan._CHUNKS_PER_SEQUENCE = per_processor, per_sequence
            figures = "  ".join(f"{name}: {case.step_us():.1f}" for name, case in cases.items())
            print(f"plan {per_processor} {per_sequence}: {figures}")


def sweep_prefill() -> None:
    tilings = [(128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3),
               (64, 128, 4, 2), (128, 32, 8, 4), (128, 64, 4, 3), (128, 128, 8, 3), (256, 64, 8, 3)]  # fmt: skip
    for shape in SHAPES:
        cases = [Case(shape, PREFILLS[name], 128, 4) for name in ("2 x 4096", "16 x 512", "64 x 128 on 2048")]
        for numbers in tilings:
            tiling = prefill.Tiling(*numbers)
            print(f"{shape} {tiling}", end="")
            for case in cases:
                print(
                    "  ",
                    tried(lambda case=case, tiling=tiling: f"{case.flops / prefill_us(case, tiling) / 1e6:6.0f}"),
                    end="",
                )
            print()


def prefill_us(case: Case, tiling: prefill.Tiling) -> float:
    out = torch.empty(case.batch.num_tokens, case.spec.num_heads * case.spec.head_dim, device="cuda", dtype=DTYPE)
    return graph_us(lambda: [prefill.attend_chunks(*case.layer(i), out, tiling) for i in range(4)], 4)


LINEARS = {
    "8B qkv": (6144, 4096), "8B o": (4096, 4096), "8B gate_up": (28672, 4096), "8B down": (4096, 14336),
    "1B qkv": (3072, 2048), "1B o": (2048, 2048), "1B gate_up": (16384, 2048), "1B down": (2048, 8192),
    "8B head": (128256, 4096), "1B head": (128256, 2048),
}  # fmt: skip


def sweep_gemv() -> None:
    """One row times a weight: our tilings against cuBLAS."""
    numbers = [(4, 1024, 4), (2, 2048, 4), (8, 512, 4), (4, 2048, 8), (1, 2048, 4), (8, 1024, 8), (2, 4096, 8)]
    tilings = [gemv.Tiling(*each) for each in numbers]
    for name, (rows, columns) in LINEARS.items():
        copies = max(2, min(16, int(1e9 / (rows * columns * 2))))
        weights = torch.randn(copies, rows, columns, device="cuda", dtype=DTYPE)
        x = torch.randn(1, columns, device="cuda", dtype=DTYPE)
        us = graph_us(lambda x=x, weights=weights: [F.linear(x, weight) for weight in weights], copies)
        print(f"{name:11} cuBLAS {bandwidth(rows * columns * 2, us)}")
        for tiling in tilings:
            us = graph_us(
                lambda x=x, weights=weights, tiling=tiling: [gemv.gemv(x, weight, None, tiling) for weight in weights],
                copies,
            )
            print(f"{'':11} {tiling} {bandwidth(rows * columns * 2, us)}")


def tried(measure: Callable[[], str]) -> str:
    try:
        return measure()
    except Exception as error:  # a tiling that does not fit the processor
        return type(error).__name__


PARTS: dict[str, Callable[[], None]] = {
    "small": small,
    "decode": decodes,
    "prefill": prefills,
    "sweep-decode": sweep_decode,
    "sweep-plan": sweep_plan,
    "sweep-prefill": sweep_prefill,
    "sweep-gemv": sweep_gemv,
}

if __name__ == "__main__":
    for part in sys.argv[1:] or ["small", "decode", "prefill"]:
        PARTS[part]()
