"""The roofline beside steps of one rank and of two that share one H200: `python -m tools.roofline --ranks` prints the
table of docs/benchmarks.md. Of two ranks on one GPU each reads its half of the weights through the same memory: what
they take longer than one is communication, the part that predictions for several GPUs are made with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.capacity.hardware import hardware
from penstock.capacity.shapes import SHAPES
from penstock.capacity.step_cost import PENSTOCK, StepCost
from penstock.core.parallelism import Parallelism

# Milliseconds of a step (docs/benchmarks.md, "Two ranks on one GPU", bf16): W1 and W1b, of one rank and of `--tp 2`.
MEASURED_MS = {
    ("llama1b", 1): (0.87, 1.22),
    ("llama1b", 8): (1.08, 1.55),
    ("llama8b", 1): (4.05, 4.63),
    ("llama8b", 8): (4.43, 5.33),
}
CONTEXT = 128 + 256 / 2  # of a stream of 128 + 256 tokens, averaged over its life


@dataclass(frozen=True)
class Checked:
    shape: str
    streams: int
    one_s: float  # measured, one rank
    predicted_s: float
    added_s: float  # measured, by which two ranks on the same GPU take longer
    communication_s: float  # predicted, of two ranks


def checked() -> Iterator[Checked]:
    gpu = hardware()["h200"]
    for (shape, streams), (one_ms, two_ms) in MEASURED_MS.items():
        one, two = (StepCost(SHAPES[shape], gpu, PENSTOCK, parallelism=Parallelism(tp)) for tp in (1, 2))
        predicted_s = one.seconds(0, 0, streams, streams * CONTEXT)
        yield Checked(
            shape, streams, one_ms / 1e3, predicted_s, (two_ms - one_ms) / 1e3, two.communication_s(0, streams)
        )


def markdown(found: Iterator[Checked]) -> str:
    lines = [
        "| model | streams | one rank, measured | predicted | predicted : measured | two ranks take longer, measured | "
        "communication, predicted | predicted : measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {each.shape} | {each.streams} | {1e3 * each.one_s:.2f} ms | {1e3 * each.predicted_s:.2f} ms | "
        f"{each.predicted_s / each.one_s:.2f} | {1e3 * each.added_s:.2f} ms | {1e3 * each.communication_s:.2f} ms | "
        f"{each.communication_s / each.added_s:.2f} |"
        for each in found
    ]
    return "\n".join(lines)
