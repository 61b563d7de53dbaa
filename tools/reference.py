"""Write docs/reference/ from the code: `python tools/reference.py`; `--check` fails if a page is out of date."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from penstock.api.errors import STATUS_TABLE, anthropic_status, anthropic_type
from penstock.cli.flags import SECTIONS, flag, members, show
from penstock.cli.main import parser
from penstock.core.errors import all_errors
from penstock.core.settings import Settings
from penstock.gateway.settings import GatewaySettings
from penstock.observe.catalog import CATALOG, Metric
from penstock.observe.gateway_catalog import GATEWAY_CATALOG

DIRECTORY = Path(__file__).parent.parent / "docs" / "reference"
HEAD = "<!-- Written by tools/reference.py from the code. Do not edit. -->\n\n"


def config_page() -> str:
    lines = ["# Settings\n", "One YAML file (`penstock serve --config penstock.yaml`), or flags; flags win.\n"]
    hints = get_type_hints(Settings)
    lines += ["`model`: " + Settings.__dataclass_fields__["model"].metadata["help"] + ". Default: `smollm2`.\n"]
    for section in SECTIONS:
        kinds = get_type_hints(hints[section])
        lines += [f"## {section}\n", "| key | flag | type | default | |", "|---|---|---|---|---|"]
        for field in dataclasses.fields(hints[section]):
            kind = _type_name(kinds[field.name])
            default = f"`{show(field.default)}`"
            lines.append(
                f"| `{section}.{field.name}` | `{flag(field.name)}` | {kind} | {default} | {field.metadata['help']} |"
            )
        lines.append("")
    return "\n".join([*lines, *_gateway_settings(), ""])


def _gateway_settings() -> list[str]:
    kinds = get_type_hints(GatewaySettings)
    lines = ["## Of a gateway\n", "`penstock gateway --config penstock.yaml`: [its page](../gateway.md).\n"]
    lines += ["| key | type | default | |", "|---|---|---|---|"]
    for field in dataclasses.fields(GatewaySettings):
        if "help" in field.metadata:
            kind, default = _type_name(kinds[field.name]), f"`{show(field.default)}`"
            lines.append(f"| `{field.name}` | {kind} | {default} | {field.metadata['help']} |")
    return lines


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    return " or ".join(member.__name__ for member in members(kind) if member is not type(None))


def cli_page() -> str:
    root = parser()
    parts = ["# Command line\n", _help(root)]
    for action in root._actions:
        if isinstance(action, argparse._SubParsersAction):
            parts += [f"## penstock {name}\n\n{_help(command)}" for name, command in action.choices.items()]
    return "\n".join(parts)


def _help(command: argparse.ArgumentParser) -> str:
    command.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=100)
    return f"```\n{command.format_help().strip()}\n```\n"


def errors_page() -> str:
    lines = [
        "# Errors\n",
        'Every error is JSON: `{"error": {"message", "type", "param", "code"}}`, and at `/v1/messages` Anthropic\'s',
        '`{"type": "error", "error": {"type", "message", "details": {"error_code", "param"}}, "request_id"}`.',
        "`code` is stable; 429, 503 and 529 carry `Retry-After`.\n",
        "| code | HTTP status | type | Anthropic | class |",
        "|---|---|---|---|---|",
    ]
    for error in all_errors():
        row, status = STATUS_TABLE[error], anthropic_status(error(""))
        theirs = f"{status} `{anthropic_type(status)}`"
        lines.append(f"| `{error.code}` | {row.status} | `{row.type}` | {theirs} | `{error.__name__}` |")
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    lines = ["# Metrics\n", "At `/metrics`, in the Prometheus format.\n"]
    for title, catalog in (("Of a replica", CATALOG), ("Of a gateway", GATEWAY_CATALOG)):
        lines += [f"## {title}\n", "| name | kind | labels | |", "|---|---|---|---|", *map(_metric_row, catalog), ""]
    return "\n".join(lines)


def _metric_row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |"


PAGES = {"config.md": config_page, "cli.md": cli_page, "errors.md": errors_page, "metrics.md": metrics_page}


def main() -> None:
    check = "--check" in sys.argv[1:]
    stale = []
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        path, text = DIRECTORY / name, HEAD + page()
        if check and (not path.exists() or path.read_text() != text):
            stale.append(name)
        elif not check:
            path.write_text(text)
    if stale:
        sys.exit(f"docs/reference is out of date ({', '.join(stale)}): run `make format`")


if __name__ == "__main__":
    main()
