"""Choice of the number format that this processor runs fastest: measured once, in a child process, and remembered.

It is measured, because the flags do not tell: bfloat16 products halve the time on one processor and double it on
another. A child does it, because an instruction that the flags promise may still trap and kill the process that tries
it. It times the linear layers of a small model, at the batch sizes that serving meets; the verdict is kept with
everything it depends on in its name.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from penstock.core.cores import usable_cores
from penstock.core.crash_stacks import write_stacks_on_crash
from penstock.core.private_files import make_private
from penstock.hub.home import penstock_home
from penstock.model.ops import Linear, Ops
from penstock.model.ops.build import KernelsUnavailable, build_kernels, cpu_identity
from penstock.model.ops.library import ARITHMETICS, GROUP
from penstock.model.ops.native import NativeOps
from penstock.model.ops.reference import ReferenceOps
from penstock.model.quantized.grouped import GroupedWeight

Dtype = Literal["auto", "float32", "bfloat16"]

# Weight of each batch size: one stream, a few, many, and a prompt. They multiply the logarithms of the times, so
# a format that is twice as fast at one size and half as fast at another of the same weight gains nothing.
BATCH_WEIGHTS = {1: 0.3, 8: 0.3, 32: 0.2, 128: 0.2}
# Candidates come from the most exact to the least; a less exact one must be this much faster to be chosen.
WORTHWHILE_GAIN = 0.05
# [out, in] of one layer (SmolLM2-135M); enough layers that their weights, of so many bits, do not stay in any cache.
PROBE_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
PROBE_LAYERS = {16: 6, 8: 12, 4: 20}
PROBE_SECONDS = 0.08  # for each batch size of each candidate
PROBE_TIMEOUT_S = 120
# Hides AMX from oneDNN. Some hypervisors show the flag and not the tiles: torch's own bfloat16 then traps.
WITHOUT_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}


@dataclass(frozen=True)
class Format:
    """A way to store weights and to compute with them."""

    kernels: Literal["native", "reference"]
    arithmetic: str  # of library.ARITHMETICS; for the reference, a torch dtype
    keeps: list[int] = field(default_factory=list)  # bits of quantized weights that are not widened
    environment: dict[str, str] = field(default_factory=dict)  # must be set before torch computes
    timings_ms: dict[str, float] = field(default_factory=dict)  # of one of the probe's layers, by batch size
    fallback_reason: str | None = None  # why there are no native kernels

    @property
    def dtype(self) -> str:
        return self.arithmetic.removesuffix("_dot")

    @property
    def score(self) -> float:
        """Lower is faster; see BATCH_WEIGHTS."""
        return sum(weight * math.log(self.timings_ms[str(m)]) for m, weight in BATCH_WEIGHTS.items())

    def ops(self, threads: int | None = None, kv_dtype: torch.dtype | None = None) -> Ops:
        os.environ.update(self.environment)
        if self.kernels == "native":
            return NativeOps(self.arithmetic, threads=threads, keeps=frozenset(self.keeps), kv_dtype=kv_dtype)
        return ReferenceOps("cpu", getattr(torch, self.arithmetic), kv_dtype=kv_dtype)


TORCH_BFLOAT16 = Format("reference", "bfloat16")
NATIVE = tuple(Format("native", arithmetic) for arithmetic in ARITHMETICS)
LOW_BIT = tuple(Format("native", "float32", keeps=[bits]) for bits in (4, 8))
REFERENCE = (Format("reference", "float32"), TORCH_BFLOAT16)


def choose_format(
    dtype: Dtype = "auto",
    threads: int | None = None,
    *,
    keep_low_bit: bool = False,
    keep: frozenset[int] = frozenset(),
) -> Format:
    """The fastest format of this dtype on this machine, or of all for "auto".

    Quantized weights are kept as they are where one asks for it and it is faster (never for "float32"). Weights of the
    bits in `keep` are kept in any case: KernelsUnavailable if they cannot be.
    """
    reason, library = _find_kernels()
    if keep and library is None:
        raise KernelsUnavailable(reason)
    if dtype == "float32" and not keep:  # one candidate each: nothing to measure
        return Format("native" if library else "reference", "float32", fallback_reason=reason)
    threads = threads or usable_cores()
    native = (*NATIVE, *LOW_BIT) if keep_low_bit or keep else NATIVE
    measured = _measured(native if library else REFERENCE, threads, library)
    if lost := keep.difference(*(each.keeps for each in measured)):
        raise KernelsUnavailable(f"this processor has no instruction for weights of {min(lost)} bits")
    chosen = fastest(each for each in measured if not each.keeps and dtype in ("auto", each.dtype))
    if chosen is None:  # every candidate trapped
        return Format("reference", "float32", fallback_reason=reason or "every native format trapped")
    faster = [each for each in measured if each.keeps and dtype != "float32" and fastest((chosen, each)) is each]
    kept = keep.union(*(each.keeps for each in faster)) if keep_low_bit else keep
    return replace(chosen, fallback_reason=reason, keeps=sorted(kept))


def fastest(measured: Iterable[Format]) -> Format | None:
    best: Format | None = None
    for candidate in measured:
        if best is None or candidate.score < best.score + math.log(1 - WORTHWHILE_GAIN):
            best = candidate
    return best


def _find_kernels() -> tuple[str | None, Path | None]:
    try:
        return None, build_kernels()
    except KernelsUnavailable as error:
        return str(error), None


def _measured(candidates: Sequence[Format], threads: int, library: Path | None) -> list[Format]:
    """Candidates that run here, with their timings; from the file that an earlier run left, if any."""
    asked = (*candidates, BATCH_WEIGHTS, PROBE_SHAPES, PROBE_LAYERS)
    key = "\0".join((cpu_identity(), torch.__version__, str(library and library.stem), str(threads), repr(asked)))
    verdict = penstock_home() / "formats" / f"{hashlib.sha256(key.encode()).hexdigest()[:20]}.json"
    try:
        return [Format(**fields) for fields in json.loads(verdict.read_text())]
    except (OSError, ValueError, TypeError):
        measured = list(_measure_in_children(candidates, threads))
        _save(verdict, measured)
        return measured


def _save(verdict: Path, measured: list[Format]) -> None:
    try:
        make_private(verdict.parent)
        with tempfile.NamedTemporaryFile("w", dir=verdict.parent, delete=False) as file:
            json.dump([asdict(candidate) for candidate in measured], file, indent=1)
        os.replace(file.name, verdict)
    except OSError:
        pass  # a read-only home: measured again next time


def _measure_in_children(candidates: Sequence[Format], threads: int) -> Iterator[Format]:
    """One child measures them all; where it dies, the next one goes on behind the candidate that killed it."""
    left = list(candidates)
    while left:
        done = _run_child(left, threads)
        yield from (candidate for candidate in done if candidate.timings_ms)
        trapped, left = left[len(done) : len(done) + 1], left[len(done) + 1 :]
        if trapped == [TORCH_BFLOAT16]:
            left.append(replace(TORCH_BFLOAT16, environment=WITHOUT_AMX))


def _run_child(candidates: Sequence[Format], threads: int) -> list[Format]:
    """Measured candidates, in order, up to the one that killed the child."""
    command = [sys.executable, "-m", __name__, str(threads), json.dumps([asdict(each) for each in candidates])]
    environment = os.environ | candidates[0].environment
    try:
        child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [Format(**json.loads(line)) for line in child.stdout.splitlines()]


def measure(candidate: Format, threads: int) -> dict[str, float]:
    """Milliseconds for one of the probe's layers, by batch size; nothing if the processor cannot do it."""
    try:
        ops = candidate.ops(threads)
    except KernelsUnavailable:
        return {}
    bits = candidate.keeps[0] if candidate.keeps else 16
    layers = [[random_linear(ops, shape, bits) for shape in PROBE_SHAPES] for _ in range(PROBE_LAYERS[bits])]
    return {str(m): 1000 * _best_layer_s(layers, m, ops.activation_dtype) for m in BATCH_WEIGHTS}


def random_linear(ops: Ops, shape: tuple[int, int], bits: int) -> Linear:
    """Linear of random weights of so many bits; 16 is whatever the operations widen weights to."""
    if bits == 16:
        return ops.linear(torch.randn(shape))
    assert isinstance(ops, NativeOps), "no others keep such weights"
    out, columns = shape
    values = torch.randint(256, (out, columns * bits // 8), dtype=torch.uint8)
    scales, minimums = torch.rand(2, out, columns // GROUP)
    return ops.linear(GroupedWeight(values, 4 if bits == 4 else 8, scales, minimums=minimums))


def _best_layer_s(layers: Sequence[Sequence[Linear]], m: int, dtype: torch.dtype) -> float:
    """Seconds of the fastest run of a layer. Each is met again only after all others, so it comes from memory; and it
    is short enough that some are not interrupted by other processes of the machine."""
    inputs = [torch.randn(m, k).to(dtype) for _, k in PROBE_SHAPES]
    best, started = math.inf, time.perf_counter()
    while best == math.inf or time.perf_counter() - started < PROBE_SECONDS:
        for layer in layers:
            before = time.perf_counter()
            for linear, x in zip(layer, inputs, strict=True):
                linear(x)
            best = min(best, time.perf_counter() - before)
    return best


def _child_main(threads: int, candidates: list[Format]) -> None:
    torch.set_num_threads(threads)
    with torch.inference_mode():
        for candidate in candidates:
            measured = replace(candidate, timings_ms=measure(candidate, threads))
            print(json.dumps(asdict(measured)), flush=True)  # one line each: the next candidate may be the last


if __name__ == "__main__":
    write_stacks_on_crash()
    _child_main(int(sys.argv[1]), [Format(**fields) for fields in json.loads(sys.argv[2])])
