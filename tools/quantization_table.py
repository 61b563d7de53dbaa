"""What each method costs and saves on the two models at hand, as the table of docs/benchmarks.md.

    python -m tools.quantization_table DIR [--write docs/benchmarks.md]

It takes long, and goes on where it was killed.
SmolLM2 is a 4-bit file already: its losses are against its own numbers. stories15M is in full precision, and judged by
stories like its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

from tools.stories15m import stories15m

from penstock.bench.machine import cpu_name

STORIES = Path(__file__).parents[1] / "tests" / "quant" / "stories"
STORIES_TEXTS = ["--calibration", str(STORIES / "calibration.txt"), "--evaluation", str(STORIES / "evaluation.txt")]
METHODS = {
    "gptq": ["--method", "gptq"],
    "gptq, act-order": ["--method", "gptq", "--act-order"],
    "gptq, asymmetric": ["--method", "gptq", "--asym"],
    "awq": ["--method", "awq"],
    "int8 (W8A8)": ["--method", "int8"],
    "fp8": ["--method", "fp8"],
}
BEGIN, END = "<!-- quantization quality: begin -->", "<!-- quantization quality: end -->"


def main() -> None:
    parser = argparse.ArgumentParser(description="The quality of every method, on two models.")
    parser.add_argument("directory", type=Path, help="where the quantized models and their reports go")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table there, between its marks")
    arguments = parser.parse_args()
    models = {"SmolLM2-135M": ("smollm2", []), "stories15M": (str(stories15m()), STORIES_TEXTS)}
    rows = [
        row(name, label, report(arguments.directory, name, model, label, [*words, *texts]))
        for name, (model, texts) in models.items()
        for label, words in METHODS.items()
    ]
    table = "\n".join([*head(), *rows])
    print(table)
    if arguments.write:
        text = arguments.write.read_text()
        before, rest = text.split(BEGIN, 1)
        arguments.write.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.split(END, 1)[1]}")


def report(directory: Path, name: str, model: str, label: str, words: list[str]) -> dict[str, Any]:
    out = directory / f"{name}-{label.split(' (')[0].replace(', ', '-')}"
    path = out.with_suffix(".json")
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "penstock", "quantize", model, str(out), *words, "--json", str(path)]
        subprocess.run(command, check=True)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def head() -> list[str]:
    return [
        f"{date.today().isoformat()}, {cpu_name()}, Python {platform.python_version()}:",
        "",
        "| model | method | group | linears, less than 16 bits | perplexity | rounded to nearest "
        "| divergence, rounded | tokens/s at 1, 8 |",
        "|---|---|---|---|---|---|---|---|",
    ]


def row(name: str, label: str, found: dict[str, Any]) -> str:
    quality, sizes, speed = found["quality"], found["sizes"], found["speed"]
    before = quality["before"]["perplexity"]

    def lost(one: dict[str, float] | None) -> str:
        return "" if one is None else f"{one['perplexity']:.2f} ({one['perplexity'] / before - 1:+.1%})"

    nearest = quality["nearest"]
    divergence = f"{quality['after']['divergence']:.4f}" + (f", {nearest['divergence']:.4f}" if nearest else "")
    saved = 1 - sizes["linears_in_memory"] / sizes["linears_in_16_bits"]
    speeds = ", ".join(f"{speed['before'][count]:.0f} → {speed['after'][count]:.0f}" for count in speed["before"])
    after = f"{before:.2f} → {lost(quality['after'])}"
    group = found["recipe"]["group"] or "row"
    return f"| {name} | {label} | {group} | {saved:.1%} | {after} | {lost(nearest)} | {divergence} | {speeds} |"


if __name__ == "__main__":
    main()
