"""The costs and savings of each method on the two models at hand, as the table of docs/benchmarks.md.

    python -m tools.quantization_table DIR [--write docs/benchmarks.md]
    python -m tools.quantization_table DIR --models SmolLM2-135M --samples 32 --eval-windows 8     # on a busy machine

It takes long, and goes on where it was killed. Reports that are there stay; the table has all of them.
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
from itertools import product
from pathlib import Path
from typing import Any

from tools.stories15m import stories15m

from penstock.bench.machine import cpu_name

STORIES = Path(__file__).parents[1] / "tests" / "quant" / "stories"
MODELS = ("SmolLM2-135M", "stories15M")
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
    parser.add_argument("--models", default=",".join(MODELS), help="those to quantize (default: both)")
    parser.add_argument("--samples", type=int, metavar="N", help="as `penstock quantize` has it, and its default")
    parser.add_argument("--eval-windows", type=int, metavar="N", help="the same")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table there, between its marks")
    arguments = parser.parse_args()
    sources = {"SmolLM2-135M": "smollm2", "stories15M": str(stories15m())}
    for model, (method, words) in product(arguments.models.split(","), METHODS.items()):
        out = place(arguments.directory, model, method)
        if not out.with_suffix(".json").exists():
            make(out, sources[model], [*words, *options(model, method, arguments)])
    places = [(model, method, place(arguments.directory, model, method)) for model, method in product(MODELS, METHODS)]
    rows = [row(model, method, out) for model, method, out in places if out.with_suffix(".json").exists()]
    table = "\n".join([*head(), *rows])
    print(table)
    if arguments.write:
        text = arguments.write.read_text()
        before, rest = text.split(BEGIN, 1)
        arguments.write.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.split(END, 1)[1]}")


def place(directory: Path, model: str, method: str) -> Path:
    return directory / f"{model}-{method.split(' (')[0].replace(', ', '-')}"


def options(model: str, method: str, arguments: argparse.Namespace) -> list[str]:
    """Texts and how much of them. stories15M knows nothing but stories; int8 and FP8 are fitted to no text."""
    is_fitted, has_stories = method.startswith(("gptq", "awq")), model == "stories15M"
    found = {
        "--calibration": STORIES / "calibration.txt" if has_stories and is_fitted else None,
        "--samples": arguments.samples if is_fitted else None,
        "--evaluation": STORIES / "evaluation.txt" if has_stories else None,
        "--eval-windows": arguments.eval_windows,
    }
    return [word for name, value in found.items() if value is not None for word in (name, str(value))]


def make(out: Path, source: str, words: list[str]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "penstock", "quantize", source, str(out), *words]
    subprocess.run([*command, "--json", str(out.with_suffix(".json"))], check=True)


def head() -> list[str]:
    return [
        f"{date.today().isoformat()}, {cpu_name()}, Python {platform.python_version()}:",
        "",
        "| model | method | group | linears, less than 16 bits | perplexity | rounded to nearest "
        "| divergence, rounded | tokens fitted to, judged by | tokens/s at 1, 8 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]


def row(name: str, label: str, out: Path) -> str:
    found: dict[str, Any] = json.loads(out.with_suffix(".json").read_text())
    making = json.loads((out / "quantize.json").read_text())
    fitted = making["samples"] * making["seq_len"] if "samples" in making else None
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
    texts = f"{fitted:,}, {quality['tokens']:,}" if fitted else f"{quality['tokens']:,}"
    cells = (name, label, group, f"{saved:.1%}", after, lost(nearest), divergence, texts, speeds)
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
