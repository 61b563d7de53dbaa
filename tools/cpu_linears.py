"""The linears of one layer of SmolLM2 on this CPU, weights of 16, 8 and 4 bits side by side.

    taskset -c 1 python tools/cpu_linears.py [--threads 1] [--rows 1,8,32,128] [--seconds 3]

The formats take turns, and the best layer of each counts: whoever else uses the machine spoils the others.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence

import torch

from penstock.model.ops import Linear
from penstock.model.ops.formats import PROBE_LAYERS, PROBE_SHAPES, random_linear
from penstock.model.ops.native import NativeOps

NAMES = {16: "bfloat16_dot", 8: "int8", 4: "int4"}
STORED_BYTES = {16: 2.0, 8: 1.125, 4: 0.625}  # of a weight, with its part of scale and minimum
WEIGHTS = sum(n * k for n, k in PROBE_SHAPES)

Layers = Sequence[Sequence[Linear]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", default="1,8,32,128")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each number of rows")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ops = NativeOps("bfloat16_dot", arguments.threads, frozenset({4, 8}))
    models = {bits: _layers(ops, bits) for bits in NAMES}
    print(f"{'rows':>5}  {'weights':12} {'ms a layer':>10} {'GOP/s':>7} {'GB/s':>6}  to bfloat16_dot")
    for m in map(int, arguments.rows.split(",")):
        best = _best_s(models, m, arguments.seconds)
        for bits, seconds in best.items():
            speed, read = 2 * m * WEIGHTS / seconds / 1e9, STORED_BYTES[bits] * WEIGHTS / seconds / 1e9
            ratio = best[16] / seconds
            print(f"{m:5}  {NAMES[bits]:12} {1000 * seconds:10.3f} {speed:7.0f} {read:6.1f}  {ratio:.2f}")


def _layers(ops: NativeOps, bits: int) -> Layers:
    return [[random_linear(ops, shape, bits) for shape in PROBE_SHAPES] for _ in range(PROBE_LAYERS[bits])]


def _best_s(models: dict[int, Layers], m: int, seconds: float) -> dict[int, float]:
    """Returns the best seconds of one layer, by bits."""
    inputs = [torch.randn(m, k) for _, k in PROBE_SHAPES]
    best, started = dict.fromkeys(models, math.inf), time.perf_counter()
    while time.perf_counter() - started < seconds:
        for bits, layers in models.items():
            for layer in layers:
                before = time.perf_counter()
                for linear, x in zip(layer, inputs, strict=True):
                    linear(x)
                best[bits] = min(best[bits], time.perf_counter() - before)
    return best


if __name__ == "__main__":
    with torch.inference_mode():
        main()
