"""The timing of a kernel, and the sizes that all parts time. It knows none of our kernels.

Every case is a CUDA graph of many layers, each with its own cache, weights and inputs, so that no layer finds the one
before in the L2 cache and launches cost what they cost in a captured step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

DTYPE, FP8 = torch.bfloat16, torch.float8_e4m3fn


class Model(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    ffn: int
    layers: int

    @property
    def hidden(self) -> int:
        return self.heads * self.dim

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of qkv, output, gate_up and down."""
        qkv = (self.heads + 2 * self.kv_heads) * self.dim
        return [(qkv, self.hidden), (self.hidden, self.hidden), (2 * self.ffn, self.hidden), (self.hidden, self.ffn)]


MODELS = {"8B": Model(32, 8, 128, 14336, 32), "1B": Model(32, 8, 64, 8192, 16), "70B": Model(64, 8, 128, 28672, 80)}
TIMED = ("8B", "1B")  # unless a part says otherwise


def randn(*size: int) -> Tensor:
    return torch.randn(*size, device="cuda", dtype=DTYPE)


def graph_us(run: Callable[[], object], calls: int = 1) -> float:
    """Microseconds of one of the `calls` that `run` makes: the median of replays of its graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which may still be making the inputs
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


def each_us(call: Callable[[int], object], copies: int) -> float:
    """Microseconds of `call` on one of its copies, when it goes over all of them."""
    return graph_us(lambda: [call(i) for i in range(copies)], copies)


def copies_of(num_bytes: int) -> int:
    """Returns as many as the L2 cache cannot hold, within reason."""
    return min(2 + int(2e8 // num_bytes), 64)


def bandwidth(num_bytes: float, us: float) -> str:
    return f"{us:9.1f} µs {num_bytes / us / 1e6:6.2f} TB/s"


def throughput(flops: float, us: float) -> str:
    return f"{us:9.1f} µs {flops / us / 1e6:6.0f} TFLOP/s"


def tried(measure: Callable[..., str], *arguments: object) -> str:
    try:
        return measure(*arguments)
    except Exception as error:  # a tiling that does not fit the processor, or sizes that a library does not take
        return type(error).__name__
