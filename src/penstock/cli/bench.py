"""`penstock bench KIND`: servers under load, measured through their HTTP APIs, or the engine alone."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from penstock.cli.bench_flags import add_bench_saturation, add_bench_serve
from penstock.cli.bench_gateway import add_bench_gateway, bench_gateway
from penstock.cli.bench_serve import bench_saturation, bench_serve
from penstock.cli.flags import add_section
from penstock.core.errors import ConfigError
from penstock.core.files import check_outputs, write_file, write_json


def add_flags(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="KIND")
    add_bench_serve(kinds.add_parser("serve", help="any OpenAI-compatible server under a load of your choice"))
    add_bench_saturation(kinds.add_parser("saturation", help="the highest load at which a server keeps an SLO"))
    cpu = kinds.add_parser("cpu", help="the four workloads of docs/benchmarks.md: a server of our own, and peers")
    _add_http(cpu, "decode1, c8, c32, prefix")
    http = kinds.add_parser("http", help="the workloads of a GPU, through the HTTP APIs of servers that run already")
    _add_http(http, "W1, W1b, W2, W4, W6")
    _add_engine(kinds.add_parser("engine", help="one device: the engine in process, with random weights of a shape"))
    add_bench_gateway(kinds.add_parser("gateway", help="our gateway and others in turns, in front of a fake upstream"))


def _add_http(parser: argparse.ArgumentParser, workloads: str) -> None:
    parser.add_argument(
        "--url",
        dest="urls",
        action="append",
        default=[],
        type=_named_url,
        metavar="NAME=URL",
        help="a server that runs already, measured in turns with the others; penstock=URL is one of ours",
    )
    parser.add_argument("--model", default="smollm2", help="what is served: its tokens are counted (default: smollm2)")
    parser.add_argument("--workload", metavar="NAME,…", help=f"some of {workloads} (default: all)")
    parser.add_argument(
        "--rounds", type=_positive, default=3, metavar="N", help="the medians of N are shown (default: 3)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement there")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="put the tables into this Markdown, between its markers"
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape", default="llama8b", help="llama1b, llama8b, llama70b, mixtral-8x7b, … or tiny (default: llama8b)"
    )
    parser.add_argument("--layers", type=_positive, metavar="N", help="only so many of its layers (default: all)")
    parser.add_argument("--load", choices=["dummy"], default="dummy", help="random weights")
    parser.add_argument("--workload", default="W1,W1b,W2,W4,W6", metavar="NAME,…", help="of W1, W1b, W2, W3, W4, W6")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="the Azure conversation trace, for W3")
    parser.add_argument("--rounds", type=_positive, default=3, metavar="N", help="the best of N is shown (default: 3)")
    parks = "instead of the workloads, park and wake the engine N times (sets --parkable)"
    parser.add_argument("--park", type=_positive, default=0, metavar="N", help=parks)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    add_section(parser, "engine", leave_out=("load", "prefix_cache"))


def run(arguments: argparse.Namespace) -> None:
    """Each kind imports what it needs: a GPU machine may have no HTTP client, and a client's machine no torch."""
    if arguments.bench == "engine":
        from penstock.cli.bench_engine import bench_engine

        bench_engine(arguments)
    elif arguments.bench == "gateway":
        bench_gateway(arguments)
    elif arguments.bench == "serve":
        bench_serve(arguments)
    elif arguments.bench == "saturation":
        bench_saturation(arguments)
    else:
        _bench_http(arguments)


def _bench_http(arguments: argparse.Namespace) -> None:
    from penstock.bench.http import bench_http
    from penstock.bench.report import markdown, replace_section
    from penstock.bench.workloads import WORKLOADS, choose

    workloads = choose(arguments.workload, WORKLOADS[arguments.bench])
    if arguments.bench == "http" and not arguments.urls:
        raise ConfigError("which server? Give its --url, such as penstock=http://127.0.0.1:8000", param="url")
    check_outputs(arguments.json, arguments.write)
    if arguments.write:
        replace_section(arguments.write.read_text(), arguments.bench, "")  # told before the run if it has no place
    own_server = [sys.executable, "-m", "penstock.cli.main", *serve_arguments(arguments.model)]
    report = bench_http(
        model=arguments.model,
        urls=arguments.urls,
        serve=own_server if arguments.bench == "cpu" else None,
        workloads=workloads,
        num_rounds=arguments.rounds,
        command=f"penstock {shlex.join(sys.argv[1:])}",
    )
    text = markdown(report)
    print(f"\n{text}")
    if arguments.json:
        write_json(arguments.json, report)
    if arguments.write:
        write_file(arguments.write, replace_section(arguments.write.read_text(), arguments.bench, text))


def serve_arguments(model: str) -> list[str]:
    """Returns the arguments with which a user would start it, but that its log is kept out of our tables, and that it
    guesses nothing: greedy answers without an end repeat themselves, which would flatter whoever guesses."""
    return ["serve", model, "--port", "0", "--log-level", "warning", "--speculate", "off"]


def _named_url(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if not (name and equals and url.startswith("http")):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=URL, such as vllm=http://127.0.0.1:9001")
    return name, url


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)
