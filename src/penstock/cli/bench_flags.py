"""The flags of `penstock bench serve` and `penstock bench saturation`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

KEY_VARIABLES = ("PENSTOCK_API_KEY", "OPENAI_API_KEY")
T = TypeVar("T")


def add_bench_serve(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    load = parser.add_argument_group("the load (default: --concurrency 1; a trace: its own times)")
    load.add_argument(
        "--concurrency",
        metavar="N,…",
        type=_list_of(_positive),
        help="closed loop: so many clients, each asking again when it is answered; several are measured in turn",
    )
    load.add_argument(
        "--rate",
        metavar="R,…",
        type=_list_of(_above_0),
        help="open loop: so many requests a second, whatever becomes of them; several are measured in turn",
    )
    _add_arrivals(load)
    load.add_argument(
        "--requests",
        type=_positive,
        metavar="N",
        help="of each load; conversations, where they have turns (default: 100, or all of a file)",
    )
    load.add_argument("--duration", type=_above_0, metavar="S", help="requests begin for so long, instead of so many")
    load.add_argument("--warmup", type=int, default=0, metavar="N", help="requests before, which do not count")
    load.add_argument("--slo", metavar="ttft=0.5,…", help="of ttft, tpot and e2e, in seconds or as 50ms: goodput")
    _add_asked(parser)
    _add_output(parser)


def add_bench_saturation(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    search = parser.add_argument_group("the search")
    search.add_argument(
        "--slo", required=True, metavar="ttft=0.5,…", help="what must be kept, of ttft, tpot and e2e; seconds or 50ms"
    )
    search.add_argument(
        "--goal", type=_share, default=0.95, metavar="SHARE", help="of the requests, how many keep it (default: 0.95)"
    )
    search.add_argument(
        "--by", choices=["rate", "concurrency"], default="rate", help="what is raised (default: rate, an open loop)"
    )
    search.add_argument("--start", type=_above_0, metavar="X", help="the first load (default: from one client's pace)")
    search.add_argument(
        "--precision", type=_share, default=0.1, metavar="SHARE", help="when to stop searching (default: 0.1, 10 %%)"
    )
    search.add_argument("--seconds", type=_above_0, default=20.0, metavar="S", help="of each load (default: 20)")
    _add_arrivals(search)
    _add_asked(parser)
    _add_output(parser)


def _add_target(parser: argparse.ArgumentParser) -> None:
    target = parser.add_argument_group("the server")
    target.add_argument("--url", required=True, help="of any OpenAI-compatible server: http://127.0.0.1:8000")
    target.add_argument("--model", help="the name it is served under (default: the first the server names)")
    target.add_argument("--endpoint", choices=["chat", "completions"], default="chat", help="(default: chat)")
    target.add_argument(
        "--api-key", metavar="KEY", help=f"(default: the environment's {' or '.join(KEY_VARIABLES)}, if it has one)"
    )
    target.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="whose words prompts are made of: an alias, file, directory or hf:org/name (default: the server's own)",
    )
    target.add_argument("--context", type=_positive, metavar="N", help="tokens it takes (default: as it says)")
    target.add_argument("--timeout", type=_above_0, default=600.0, metavar="S", help="without a byte (default: 600)")
    target.add_argument("--body", type=_json_object, default={}, metavar="JSON", help="more fields; null removes one")
    target.add_argument(
        "--no-ignore-eos", action="store_true", help="let answers end early; servers that know no ignore_eos need it"
    )
    target.add_argument("--new-connections", action="store_true", help="one for each request; else they are kept")


def _add_arrivals(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--arrivals", choices=["poisson", "gamma", "constant"], default="poisson", help="of a rate (default: poisson)"
    )
    group.add_argument(
        "--burstiness",
        type=_above_0,
        default=0.5,
        metavar="X",
        help="the shape of gamma: below 1 come bursts, 1 is poisson (default: 0.5)",
    )


def _add_asked(parser: argparse.ArgumentParser) -> None:
    asked = parser.add_argument_group("what is asked")
    asked.add_argument(
        "--prompt-tokens", default="128", metavar="LENGTH", help="128, 128:512, normal:MEAN:SD[:MOST], lognormal:…"
    )
    asked.add_argument("--output-tokens", default="128", metavar="LENGTH", help="likewise (default for both: 128)")
    asked.add_argument("--turns", default="1", metavar="LENGTH", help="of a chat, each with the answers before it")
    asked.add_argument("--think", type=_not_below_0, default=0.0, metavar="S", help="mean pause between turns")
    asked.add_argument("--shared-prefix", type=_not_below_0_whole, default=0, metavar="TOKENS", help="a system prompt")
    asked.add_argument(
        "--prefixes", type=_positive, default=1, metavar="N", help="how many different ones (default: 1)"
    )
    files = asked.add_mutually_exclusive_group()
    files.add_argument("--trace", type=Path, metavar="FILE", help="of Azure (.csv) or Mooncake (.jsonl); .xz too")
    files.add_argument("--prompts", type=Path, metavar="FILE", help="your own, as JSON lines: docs/bench.md")
    asked.add_argument("--speed", type=_above_0, default=1.0, metavar="X", help="times the trace's own (default: 1)")
    asked.add_argument("--first", type=_not_below_0_whole, default=0, metavar="N", help="of the file's requests")
    asked.add_argument("--count", type=_positive, metavar="N", help="how many of them (default: all)")
    asked.add_argument("--seed", help="the same seed asks the same (default: a new one, which the report tells)")


def _add_output(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("the report")
    output.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    output.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots there")
    output.add_argument("--quiet", action="store_true", help="no progress")


def _list_of(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    return lambda text: [kind(part) for part in text.split(",")]


def _positive(text: str) -> int:
    return int(_number(text, lambda value: value >= 1 and value == int(value), "a whole number above 0"))


def _not_below_0_whole(text: str) -> int:
    return int(_number(text, lambda value: value >= 0 and value == int(value), "a whole number"))


def _above_0(text: str) -> float:
    return _number(text, lambda value: value > 0, "a number above 0")


def _not_below_0(text: str) -> float:
    return _number(text, lambda value: value >= 0, "a number that is not below 0")


def _share(text: str) -> float:
    return _number(text, lambda value: 0 < value <= 1, "a share above 0 and up to 1")


def _number(text: str, is_good: Callable[[float], bool], what: str) -> float:
    try:
        value = float(text)
        if value < float("inf") and is_good(value):
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not {what}")


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
