"""`penstock watermark`: the keys that mark what is generated, and the search for their marks in a text."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from penstock.cli.store_flags import print_json, show_time
from penstock.core.errors import InvalidValue
from penstock.core.watermark import Scheme, Seeding
from penstock.hub.watermarks import WatermarkFile
from penstock.terminal.tables import print_table


def add_flags(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    given: dict[str, Any] = {"default": argparse.SUPPRESS}

    add = verbs.add_parser("add", help="a new watermark with a secret of its own; its settings never change")
    add.add_argument("name", metavar="NAME", help="lower-case letters, digits, . _ -")
    add.add_argument(
        "--scheme",
        choices=[str(one) for one in Scheme],
        **given,
        help="green: some tokens are preferred (default); gumbel: keyed numbers in place of chance, free of distortion",
    )
    add.add_argument("--gamma", type=float, metavar="X", help="green: part of the vocabulary (default: 0.25)", **given)
    add.add_argument("--delta", type=float, metavar="X", help="green: added to its logits (default: 2)", **given)
    add.add_argument("--width", type=int, metavar="N", help="tokens of context (default: 4)", **given)
    add.add_argument(
        "--seeding",
        choices=[str(one) for one in Seeding],
        **given,
        help="left: by all of the context (default); self: by one token of it and the candidate",
    )

    verbs.add_parser("list", help="all watermarks, without their secrets")
    remove = verbs.add_parser("remove", help="a watermark and its secret: what it marked can no longer be told")
    remove.add_argument("name", metavar="NAME")

    detect = verbs.add_parser("detect", help="how likely a text has a watermark")
    detect.add_argument("file", type=Path, nargs="?", metavar="FILE", help="a text in UTF-8 (default: standard input)")
    detect.add_argument("--key", required=True, metavar="NAME", help="the watermark to look for")
    detect.add_argument(
        "--model", default="smollm2", metavar="MODEL", help="whose tokenizer made the text; no weights are read"
    )
    detect.add_argument(
        "--significant", type=float, default=1e-4, metavar="P", help="p-value of a verdict (default: 0.0001)"
    )
    for command in verbs.choices.values():
        command.add_argument(
            "--watermark-file", metavar="FILE", help="where watermarks are kept (default: as for serve)"
        )
        command.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> None:
    marks = WatermarkFile.at(arguments.watermark_file)
    match arguments.verb:
        case "add":
            fields = ("scheme", "gamma", "delta", "width", "seeding")
            mark = marks.add(arguments.name, **{k: v for k, v in vars(arguments).items() if k in fields})
            print(f"added watermark {arguments.name} ({mark.scheme}); its secret is in {marks.path}", file=sys.stderr)
        case "remove":
            marks.remove(arguments.name)
            print(f"removed watermark {arguments.name}; replicas that run keep it until they end", file=sys.stderr)
        case "list":
            _list(marks, arguments.json)
        case "detect":
            _detect(marks, arguments)


def _list(marks: WatermarkFile, as_json: bool) -> None:
    shown = ("scheme", "gamma", "delta", "width", "seeding")
    found = {name: {key: getattr(mark, key) for key in (*shown, "created_at")} for name, mark in marks.read().items()}
    if as_json:
        print_json([{"name": name, **mark} for name, mark in found.items()])
    elif not found:
        print("no watermarks yet: penstock watermark add NAME", file=sys.stderr)
    else:
        rows = []
        for name, mark in found.items():
            is_green = mark["scheme"] is Scheme.GREEN
            green = (str(mark["gamma"]), str(mark["delta"])) if is_green else ("-", "-")
            rows.append(
                (name, mark["scheme"], *green, str(mark["width"]), mark["seeding"], show_time(mark["created_at"]))
            )
        print_table(("NAME", "SCHEME", "GAMMA", "DELTA", "WIDTH", "SEEDING", "CREATED"), rows)


def _detect(marks: WatermarkFile, arguments: argparse.Namespace) -> None:
    from penstock.hub.resolve import describe
    from penstock.text.tokenizer import Tokenizer
    from penstock.text.watermark import detect

    if not 0 < arguments.significant < 1:
        raise InvalidValue("--significant is a p-value, between 0 and 1", param="significant")
    watermark = marks.find(arguments.key)
    text = _text(arguments.file)
    tokenizer = Tokenizer.load(describe(arguments.model).tokenizer_source)
    finding = detect(tokenizer.encode(text, add_special_tokens=False), watermark)
    verdict = finding.verdict(arguments.significant)
    if arguments.json:
        print_json(
            {
                "verdict": verdict,
                "z": finding.z,
                "p_value": finding.p_value,
                "tokens": finding.num_tokens,
                "scored": finding.num_scored,
                "score": finding.score,
                "expected": finding.expected,
                "scheme": finding.scheme,
                "key": arguments.key,
            }
        )
        return
    unit = "green tokens" if finding.scheme is Scheme.GREEN else "score"
    p_value = f"{finding.p_value:.2g}" if finding.p_value > 0 else "below 1e-300"
    print(f"{verdict}: z {finding.z:.2f}, p-value {p_value}")
    print(
        f"{finding.num_scored:,} of {finding.num_tokens:,} tokens count; {unit} {finding.score:,.0f}, "
        f"{finding.expected:,.0f} expected without a watermark"
    )


def _text(path: Path | None) -> str:
    try:
        return (sys.stdin.buffer.read() if path is None else path.read_bytes()).decode()
    except UnicodeDecodeError:
        raise InvalidValue(f"{path or 'standard input'} is not a text in UTF-8") from None
    except OSError as error:
        raise InvalidValue(f"cannot read {path}: {error.strerror}") from None
