"""`penstock alerts`: the alerts and the dashboard for a Prometheus and a Grafana that are there already."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from penstock.core.files import write_file


def add_flags(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, text in {
        "rules": "the alerts as rules for Prometheus (YAML)",
        "dashboard": "a dashboard for Grafana (JSON)",
        "list": "every alert: is it a page or a ticket, what does it mean, where to read on",
    }.items():
        command = verbs.add_parser(verb, help=text)
        if verb != "list":
            command.add_argument("--write", type=Path, metavar="FILE", help="where to; not set: standard output")
        if verb == "rules":
            command.add_argument(
                "--runbooks", metavar="URL", help="where the runbooks are published (default: docs/runbooks)"
            )


def run(arguments: argparse.Namespace) -> None:
    if arguments.verb == "list":
        from penstock.watch.kinds import KINDS

        for kind in KINDS:
            print(f"{kind.severity:<7} {kind.name:<21} {kind.means} ({kind.page})")
        return
    text = _rules(arguments.runbooks) if arguments.verb == "rules" else _dashboard()
    if arguments.write is None:
        sys.stdout.write(text)
    else:
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        write_file(arguments.write, text)


def _rules(runbooks: str | None) -> str:
    import yaml

    from penstock.watch.kinds import RUNBOOKS
    from penstock.watch.prometheus_rules import rules_document

    head = "# Written by `penstock alerts rules`. Do not edit.\n"
    return head + yaml.safe_dump(rules_document(runbooks or RUNBOOKS), sort_keys=False, width=120)


def _dashboard() -> str:
    from penstock.watch.grafana import dashboard

    return json.dumps(dashboard(), indent=2) + "\n"
