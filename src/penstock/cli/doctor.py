"""`penstock doctor`: looks an installation over and says what to fix, a line for each thing it looked at."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.doctor.findings import Finding

_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="to be served here: are its files complete, does it fit"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML of `penstock serve` or `penstock gateway`")
    parser.add_argument("--store", metavar="URL", help="see `penstock gateway`")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(arguments: argparse.Namespace) -> None:
    """Ends with 1 if something must be fixed."""
    from penstock.cli.config_file import read_config_file
    from penstock.cli.store_flags import store_url
    from penstock.doctor.checks import look_over

    findings = []
    read = partial(read_config_file, arguments.config) if arguments.config is not None else None
    for finding in look_over(arguments.model, read, arguments.store, store_url(None, None)):
        findings.append(finding)
        if not arguments.json:
            print(line(finding), flush=True)  # as it is found: some checks take a while
    if arguments.json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(findings)).decode())
    else:
        counts = {verdict: sum(one.verdict == verdict for one in findings) for verdict in _MARKS}
        print(f"{counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} to fix")
    if any(one.verdict == "fail" for one in findings):
        sys.exit(1)


def line(finding: Finding) -> str:
    hint = f": {finding.hint}" if finding.hint else ""
    return f"{_MARKS[finding.verdict]}  {finding.name:<12} {finding.says}{hint}"
