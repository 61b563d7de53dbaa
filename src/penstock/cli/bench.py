"""`penstock bench KIND`: servers under load, measured through their HTTP APIs."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

import msgspec

from penstock.core.errors import ConfigError


def add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser("bench", help="measure servers under load")
    kinds = bench.add_subparsers(dest="bench", required=True, metavar="KIND")
    cpu = kinds.add_parser("cpu", help="the four workloads of docs/benchmarks.md: a server of our own, and peers")
    cpu.add_argument(
        "--url", dest="urls", action="append", default=[], type=_named_url, metavar="NAME=URL",
        help="a server that runs already, measured in turns with ours; penstock=URL takes the place of ours",
    )  # fmt: skip
    cpu.add_argument(
        "--model", default="smollm2", help="what we serve, and whose tokens are counted (default: smollm2)"
    )
    cpu.add_argument("--workload", metavar="NAME,…", help="some of decode1, c8, c32, prefix (default: all)")
    cpu.add_argument("--rounds", type=_positive, default=3, metavar="N", help="the medians of N are shown (default: 3)")
    cpu.add_argument("--json", type=Path, metavar="FILE", help="write every measurement there")
    cpu.add_argument(
        "--write", type=Path, metavar="FILE", help="put the tables into this Markdown, between its markers"
    )
    engine = kinds.add_parser("engine", help="one device: the engine in process, with random weights of a shape")
    engine.add_argument("--shape", default="llama8b", help="llama1b, llama8b or llama70b (default: llama8b)")
    engine.add_argument("--load", choices=["dummy"], default="dummy", help="random weights")
    engine.add_argument("--workload", default="W1,W1b,W2,W4,W6", metavar="NAME,…", help="of W1, W1b, W2, W3, W4, W6")
    engine.add_argument("--trace", type=Path, metavar="FILE", help="the Azure conversation trace, for W3")
    engine.add_argument("--rounds", type=_positive, default=3, metavar="N", help="the best of N is shown (default: 3)")
    engine.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto")
    engine.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")


def run_bench(arguments: argparse.Namespace) -> None:
    """Each kind imports what it needs: a GPU machine may have no HTTP client, and a client's machine no torch."""
    if arguments.bench == "engine":
        from penstock.cli.bench_engine import bench_engine

        bench_engine(arguments)
    else:
        _bench_cpu(arguments)


def _bench_cpu(arguments: argparse.Namespace) -> None:
    try:
        from penstock.bench.cpu import bench_cpu
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise ConfigError("penstock bench needs aiohttp: pip install 'penstock[bench]'") from None
    from penstock.bench.report import markdown, replace_section
    from penstock.bench.workloads import choose

    workloads = choose(arguments.workload)
    if arguments.write:
        replace_section(_read(arguments.write), arguments.bench, "")  # what is wrong with it is told before the run
    report = bench_cpu(
        model=arguments.model,
        urls=arguments.urls,
        serve=[sys.executable, "-m", "penstock.cli.main", *serve_arguments(arguments.model)],
        workloads=workloads,
        num_rounds=arguments.rounds,
        command=f"penstock {shlex.join(sys.argv[1:])}",
    )
    text = markdown(report)
    print(f"\n{text}")
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    if arguments.write:
        arguments.write.write_text(replace_section(_read(arguments.write), arguments.bench, text))


def serve_arguments(model: str) -> list[str]:
    """As a user would start it, but that its log is kept out of our tables."""
    return ["serve", model, "--port", "0", "--log-level", "warning"]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _named_url(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if not (name and equals and url.startswith("http")):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=URL, such as vllm=http://127.0.0.1:9001")
    return name, url


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)
