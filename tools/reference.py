"""Write docs/reference/ from the code: `python tools/reference.py`; `--check` fails if a page is out of date."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import os
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from tools.model_table import models_page

from penstock.api.anthropic.messages import MessagesRequest
from penstock.api.decoding import M, NoEffect, NotBuilt, marked
from penstock.api.errors import STATUS_TABLE, anthropic_status, anthropic_type
from penstock.api.openai import ChatRequest, CompletionRequest
from penstock.api.responses import ResponsesRequest
from penstock.cli.flags import SECTIONS, default_of, flag, members, show
from penstock.cli.main import parser
from penstock.core.errors import all_errors
from penstock.core.settings import Settings, TelemetrySettings
from penstock.fleet.drivers.kubernetes_settings import KubernetesSettings
from penstock.fleet.drivers.ray_settings import RaySettings
from penstock.fleet.residency.settings import ModelEntry, ModelsSettings
from penstock.fleet.settings import FleetSettings, PoolSettings, Schedule, SpotSettings
from penstock.gateway.batches.settings import BatchSettings
from penstock.gateway.endpoint_picker.settings import EndpointPickerSettings
from penstock.gateway.records.request_log import LogSettings
from penstock.gateway.responses.settings import ResponseSettings
from penstock.gateway.settings.gateway import GatewaySettings
from penstock.observe.catalog import CATALOG, Metric
from penstock.observe.device_catalog import DEVICE_CATALOG
from penstock.observe.fleet_catalog import FLEET_CATALOG
from penstock.observe.gateway_catalog import GATEWAY_CATALOG
from penstock.observe.otlp.names import named
from penstock.observe.rollout_catalog import ROLLOUT_CATALOG
from penstock.observe.tensor_catalog import OWN as TENSOR_CATALOG
from penstock.observe.vllm_catalog import VLLM_CATALOG
from penstock.observe.watch_catalog import WATCH_CATALOG
from penstock.observe.websocket_catalog import WEBSOCKET_CATALOG
from penstock.rollout.policy.plan import GateSettings, RolloutPlan, RolloutStep
from penstock.watch.settings import AlertSettings, ProbeSettings, WatchSettings

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
            default = f"`{default_of(field)}`"
            lines.append(
                f"| `{section}.{field.name}` | `{flag(field.name)}` | {kind} | {default} | {field.metadata['help']} |"
            )
        lines.append("")
    lines.append("`telemetry`: as of a gateway, below; in the file only.\n")
    models = ["\n## Several models\n", "`penstock serve --models models.yaml`: [its page](../several-models.md).\n"]
    models += _table({"": ModelsSettings, "models.NAME.": ModelEntry})
    fleet = ["\n## Fleet\n", "`penstock fleet --config fleet.yaml`: [its page](../autoscaling.md).\n"]
    rollout = [
        "\n## Rollout plan\n",
        "`penstock rollout start MODEL --to VERSION --plan plan.yaml`: [its page](../rollouts.md).",
    ]
    rollout += ["`penstock rollout plan MODEL` prints the one that a model has without a file.\n", *_table(PLAN_GROUPS)]
    fleet += _table(FLEET_GROUPS)
    return "\n".join([*lines, *_gateway_settings(), *models, *fleet, *rollout, ""])


PLAN_GROUPS: dict[str, Any] = {"": RolloutPlan, "steps.N.": RolloutStep, "gates.NAME.": GateSettings}


FLEET_GROUPS: dict[str, Any] = {
    "": FleetSettings,
    "kubernetes.": KubernetesSettings,
    "ray.": RaySettings,
    "pools.NAME.": PoolSettings,
    "pools.NAME.spot.": SpotSettings,
    "pools.NAME.schedules.N.": Schedule,
}


def _gateway_settings() -> list[str]:
    lines = ["## Gateway\n", "`penstock gateway --config penstock.yaml`: [its page](../gateway.md).\n"]
    groups: dict[str, Any] = {
        "": GatewaySettings,
        "logs.": LogSettings,
        "telemetry.": TelemetrySettings,
        "responses.": ResponseSettings,
        "batches.": BatchSettings,
        "endpoint_picker.": EndpointPickerSettings,
        "watch.": WatchSettings,
        "watch.alerts.": AlertSettings,
        "watch.probes.": ProbeSettings,
    }
    return lines + _table(groups)


def _table(groups: dict[str, Any]) -> list[str]:
    lines = ["| key | type | default | |", "|---|---|---|---|"]
    for prefix, group in groups.items():
        kinds = get_type_hints(group)
        for field in dataclasses.fields(group):
            if "help" in field.metadata:
                default = _default(field)
                kind = _type_name(kinds[field.name])
                lines.append(f"| `{prefix}{field.name}` | {kind} | `{default}` | {field.metadata['help']} |")
    return lines


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return str(field.default_factory())
    return "none" if field.default is dataclasses.MISSING else show(field.default)


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    return " or ".join(member.__name__ for member in members(kind) if member is not type(None))


def cli_page() -> str:
    os.environ["COLUMNS"] = "102"  # argparse leaves two of them free
    root = parser()
    parts = ["# Command line\n", _help(root)]
    for action in root._actions:
        if isinstance(action, argparse._SubParsersAction):
            parts += [f"## penstock {name}\n\n{_help(command)}" for name, command in action.choices.items()]
    return "\n".join(parts)


def _help(command: argparse.ArgumentParser) -> str:
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
    lines = [
        "# Metrics\n",
        "At `/metrics`, in the Prometheus format; [over OTLP](../tracing.md#metrics) under OpenTelemetry's names.\n",
    ]
    for title, catalog in (
        ("Replica", CATALOG),
        ("Device", DEVICE_CATALOG),
        ("ONNX models (a replica's, beside requests and texts)", TENSOR_CATALOG),
        ("Gateway", GATEWAY_CATALOG),
        ("WebSockets, at replicas and gateways", WEBSOCKET_CATALOG),
        ("Monitoring by a gateway (watch)", WATCH_CATALOG),
        ("Fleet controller, exported by gateways", FLEET_CATALOG),
        ("Rollouts, exported by gateways", ROLLOUT_CATALOG),
    ):
        head = ["| name | kind | labels | | in OpenTelemetry, and its unit |", "|---|---|---|---|---|"]
        lines += [f"## {title}\n", *head, *map(_metric_row, catalog), ""]
    rows = [f"| `{one.name}` | {one.kind} | {_labels(one)} | {one.help} |" for one in VLLM_CATALOG]
    lines += ["## Replica, under vLLM's names\n", "For [stock Endpoint Pickers](../endpoint-picker.md).\n"]
    lines += ["| name | kind | labels | |", "|---|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _metric_row(metric: Metric) -> str:
    otel = named(metric)
    kind = next((f", {value}" for key, value in otel.fixed.items() if key == "gen_ai.token.type"), "")
    return f"| `{metric.name}` | {metric.kind} | {_labels(metric)} | {metric.help} | `{otel.name}`{kind}, {otel.unit} |"


def _labels(metric: Metric) -> str:
    return ", ".join(f"`{label}`" for label in metric.labels)


ARCHITECTURE = Path("docs/architecture.md")
BEGIN, END = "<!-- packages: made from pyproject.toml by tools/reference.py -->", "<!-- end -->"


def package_table() -> str:
    """The packages in the order of the import contract, the top layer first: what each is, and what it imports."""
    import grimp

    contracts = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    graph = grimp.build_graph("penstock", cache_dir=None)
    names = [name.strip() for layer in layers for name in layer.split("|")]
    lines = ["| package | what it is | imports |", "|---|---|---|"]
    for layer in layers:
        for name in map(str.strip, layer.split("|")):
            said = _first_line(Path("src", *name.split("."), "__init__.py"))
            used = [
                one
                for one in names
                if one != name and graph.direct_import_exists(importer=name, imported=one, as_packages=True)
            ]
            lines.append(f"| `{_leaf(name)}` | {said} | {', '.join(map(_leaf, used))} |")
    return "\n".join(lines)


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def _leaf(module: str) -> str:
    return module.rpartition(".")[2]


def architecture_page(text: str) -> str:
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{package_table()}\n{END}{rest.split(END)[1]}"


API = Path("docs/api.md")
FIELDS_BEGIN = "<!-- fields: made from the code by tools/reference.py -->"
REQUESTS: dict[str, type[msgspec.Struct]] = {
    "chat": ChatRequest,
    "completions": CompletionRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
}


def fields_table() -> str:
    """Every field of the requests that make texts, in the order of the code: what comes of it at each endpoint."""
    found = {name: dict(_fields(request)) for name, request in REQUESTS.items()}
    names = dict.fromkeys(field for fields in found.values() for field in fields)
    lines = ["| field | " + " | ".join(REQUESTS) + " |", "|---" * (1 + len(REQUESTS)) + "|"]
    for name in sorted(names):
        lines.append(f"| `{name}` | " + " | ".join(fields.get(name, "–") for fields in found.values()) + " |")
    notes = [f"{number}. {why}" for number, why in enumerate(_reasons(), 1)]
    return "\n".join([*lines, "", *notes])


def _fields(request: type[msgspec.Struct]) -> Iterator[tuple[str, str]]:
    """Fields of a request, and of what it holds those that are not simply done."""
    reasons, told = _reasons(), {}
    for path, built in _marks(request, NotBuilt):
        harmless = " or ".join(f"`{json.dumps(value)}`" for value in built.harmless)
        told[path] = f"refused unless {harmless}" if harmless else "refused"
    for path, mark in _marks(request, NoEffect):
        told[path] = f"no effect ({reasons.index(mark.why) + 1})"
    for name in request.__struct_encode_fields__:
        if name not in told:
            yield name, "done"
    yield from told.items()


def _reasons() -> list[str]:
    """Returns the reasons why fields have no effect, each once: their numbers stand in the table."""
    return list(dict.fromkeys(mark.why for request in REQUESTS.values() for _, mark in _marks(request, NoEffect)))


def _marks(request: type[msgspec.Struct], kind: type[M], path: str = "") -> Iterator[tuple[str, M]]:
    for name, mark in marked(request, kind):
        yield path + name, mark
    for name, hint in get_type_hints(request, include_extras=True).items():
        if (path + name) not in HELD:
            continue
        for struct in _structs(hint):
            yield from _marks(struct, kind, f"{path}{name}.")


HELD = ("stream_options", "reasoning", "text", "metadata", "structured_outputs")  # options with options of their own


def _structs(hint: Any) -> Iterator[type[msgspec.Struct]]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    for inner in get_args(hint):
        yield from _structs(inner)


def api_page(text: str) -> str:
    before, rest = text.split(FIELDS_BEGIN)
    return f"{before}{FIELDS_BEGIN}\n\n{fields_table()}\n\n{END}{rest.split(END)[1]}"


PAGES = {
    "config.md": config_page,
    "cli.md": cli_page,
    "errors.md": errors_page,
    "metrics.md": metrics_page,
    "models.md": models_page,
}


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
    for path, write in ((ARCHITECTURE, architecture_page), (API, api_page)):
        was = path.read_text()
        if (now := write(was)) != was:
            if check:
                stale.append(f"../{path.name}")
            else:
                path.write_text(now)
    if stale:
        sys.exit(f"docs/reference is out of date ({', '.join(stale)}): run `make format`")


if __name__ == "__main__":
    main()
