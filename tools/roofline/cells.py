"""Measurements on one H200, cell by cell, and what the roofline says of them.

Figures of vLLM 0.26.0 (2026-11-15: offline `LLM.generate`, its defaults, at most 256 sequences and 16,384 tokens in a
step, 0.9 of memory, bf16 KV, random weights, best of three runs) and of penstock's own engine (docs/benchmarks.md).
"""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from penstock.capacity.formats import Formats
from penstock.capacity.hardware import hardware
from penstock.capacity.memory import memory_of
from penstock.capacity.offline import EngineLimits, Step, steps
from penstock.capacity.shapes import SHAPES
from penstock.capacity.step_cost import Constants, StepCost

W3_LENGTHS = Path(__file__).with_name("azure_conv_1000.csv")  # of the first rows of Azure's conversation trace, 2023
MAX_PROMPT, MAX_OUTPUT, SHARED = 7000, 1000, 2048
MAX_NUM_SEQS, CHUNK_TOKENS = 256, 16_384

# Output tokens per second; of W6 prompt tokens per second.
MEASURED: dict[str, dict[tuple[str, str], dict[str, float]]] = {
    "vllm": {
        ("llama8b", "bfloat16"): {"W1": 200, "W1b": 1543, "W2": 9979, "W3": 5570, "W4": 7088, "W6": 41_271},
        ("llama8b", "fp8"): {"W1": 285, "W1b": 2171, "W2": 13_438, "W4": 8925, "W6": 63_088},
        ("llama1b", "bfloat16"): {"W1": 628, "W1b": 4144, "W2": 36_364, "W4": 19_632, "W6": 245_621},
        ("llama70b", "fp8"): {"W1": 48.6, "W2": 1968, "W6": 7642},
    },
    "penstock": {
        ("llama8b", "bfloat16"): {"W1": 258, "W1b": 1835, "W2": 10_854, "W3": 6066, "W4": 10_991, "W6": 42_154},
        ("llama8b", "fp8"): {"W1": 377, "W1b": 2779, "W2": 15_854, "W4": 15_297, "W6": 68_641},
        ("llama1b", "bfloat16"): {"W1": 1236, "W1b": 7465, "W2": 52_439, "W4": 53_475, "W6": 254_724},
        ("llama70b", "fp8"): {"W1": 54.0, "W2": 1996, "W6": 8277},
    },
}


@dataclass(frozen=True)
class Cell:
    shape: str
    weights: str
    workload: str
    measured: float
    predicted: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def lengths(workload: str) -> list[tuple[int, int]]:
    match workload:
        case "W1":
            return [(128, 256)]
        case "W1b":
            return [(128, 256)] * 8
        case "W2":
            return [(512, 256)] * 256
        case "W3":
            with W3_LENGTHS.open() as lines:
                rows = [(int(row["prompt"]), int(row["output"])) for row in csv.DictReader(lines)]
            return [(min(prompt, MAX_PROMPT), min(output, MAX_OUTPUT)) for prompt, output in rows]
        case "W4":
            return [(SHARED + 128, 64)] * 256
    assert workload == "W6"
    return [(4096, 1)] * 32


@cache
def workload_steps(engine: str, shape: str, weights: str, workload: str) -> tuple[tuple[Step, int], ...]:
    """Returns steps with how often each occurs. They do not depend on the constants, so that a fit makes them once."""
    formats = Formats(weights)
    memory = memory_of(SHAPES[shape], hardware()["h200"], formats=formats, chunk_tokens=CHUNK_TOKENS)
    limits = EngineLimits(MAX_NUM_SEQS, CHUNK_TOKENS, memory.kv_tokens, reads_shared_once=engine == "penstock")
    shared = SHARED if workload == "W4" else 0
    return tuple(Counter(steps(lengths(workload), shared, limits)).items())


def predict(engine: str, constants: Constants) -> list[Cell]:
    cells = []
    for (shape, weights), row in MEASURED[engine].items():
        cost = StepCost(SHAPES[shape], hardware()["h200"], constants, formats=Formats(weights))
        for workload, measured in row.items():
            taken = workload_steps(engine, shape, weights, workload)
            seconds = sum(count * cost.seconds(*step) for step, count in taken)
            sizes = lengths(workload)
            tokens = sum(prompt for prompt, _ in sizes) if workload == "W6" else sum(output for _, output in sizes)
            cells.append(Cell(shape, weights, workload, measured, tokens / seconds))
    return cells


def markdown(cells: list[Cell]) -> str:
    lines = [
        "| model | weights | workload | measured, tokens/s | predicted | predicted : measured |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {cell.shape} | {cell.weights} | {cell.workload} | {cell.measured:,g} | "
        f"{_figures(cell.predicted)} | {cell.ratio:.2f} |"
        for cell in cells
    ]
    return "\n".join(lines)


def _figures(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
