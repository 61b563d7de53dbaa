"""Command-line flags made from the settings' dataclasses, so that flags, YAML keys and the reference never differ."""

from __future__ import annotations

import argparse
import dataclasses
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from penstock.cli.config_file import read_config_file
from penstock.core.config import build
from penstock.core.settings import Settings

_hints = cache(get_type_hints)  # which takes longer than to add a flag

SECTIONS = ("engine", "server", "slo")
MOST_USED = "most used"
GATEWAY = "gateway in front of --replicas"
SEVERAL = "several models"
TOPICS = {  # of `serve --help`, in its order
    MOST_USED: (
        "server.port",
        "server.host",
        "server.name",
        "engine.device",
        "engine.quant",
        "engine.max_model_len",
        "engine.max_num_seqs",
        "engine.memory_fraction",
    ),
    "computing": (
        "engine.dtype",
        "engine.threads",
        "engine.chunk_tokens",
        "engine.max_image_tokens",
        "engine.pooling",
        "engine.load",
        "engine.parkable",
    ),
    "parallelism": (
        "engine.tp",
        "engine.pp",
        "engine.ep",
        "engine.sp",
        "engine.redundant_experts",
        "engine.expert_counts",
        "engine.rank_timeout_s",
    ),
    "several nodes": (
        "engine.nnodes",
        "engine.node_rank",
        "engine.master_addr",
        "engine.node_host",
        "engine.node_timeout_s",
        "engine.insecure_ranks",
    ),
    "KV cache": (
        "engine.kv_dtype",
        "engine.kv_gib",
        "engine.block_size",
        "engine.prefix_cache",
        "engine.host_kv_gib",
        "engine.disk_kv_gib",
        "engine.disk_kv_path",
        "engine.disk_kv_age_s",
    ),
    "prefill and decode apart": ("server.role", "engine.kv_port", "engine.kv_mover"),
    "speculative decoding": ("engine.speculate", "engine.draft", "engine.draft_tokens"),
    "LoRA adapters": (
        "server.lora",
        "server.adapter_file",
        "engine.max_loras",
        "engine.max_lora_rank",
        "engine.max_cpu_loras",
    ),
    "gRPC": ("server.grpc_port",),
    "answers": (
        "server.tool_format",
        "server.reasoning_format",
        "server.reasoning_budget",
        "server.max_reasoning_budget",
        "server.watermark",
        "server.watermark_file",
    ),
    "TLS and authentication": (
        "server.tls_cert",
        "server.tls_key",
        "server.client_ca",
        "server.gateway_secret",
        "server.metrics_token",
        "server.allowed_hosts",
        "server.allowed_origins",
    ),
    "load shedding and graceful shutdown": ("server.max_open", "server.max_body_bytes", "server.drain_timeout_s"),
    "images": (
        "server.max_images",
        "server.max_image_bytes",
        "server.max_images_bytes",
        "server.max_image_pixels",
        "server.max_image_gib",
        "server.image_threads",
        "server.image_hosts",
        "server.image_timeout_s",
    ),
    "service-level objectives": (
        "slo.ttft_s",
        "slo.tpot_s",
        "slo.latency_s",
        "slo.quantile",
        "slo.errors",
        "slo.availability",
        "slo.window_days",
    ),
    "logs and monitoring": ("engine.step_log", "server.deep_health_timeout_s", "server.dcgm_url"),
}


def add_settings(parser: argparse.ArgumentParser) -> dict[str, argparse._ArgumentGroup]:
    """`MODEL`, `--config FILE`, and a flag for every field of every section; the groups, by topic."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=_help(Settings, "model") + " (default: smollm2)")
    groups = {}
    for topic, settings in TOPICS.items():
        group = groups[topic] = parser.add_argument_group(topic)
        for name in settings:
            _add_flag(group, *name.split("."))
    groups[MOST_USED].add_argument(
        "--config", type=Path, metavar="FILE", help="YAML file with these settings; flags win over it"
    )
    return groups


def add_replica_flags(parser: argparse.ArgumentParser, examples: str) -> dict[str, argparse._ArgumentGroup]:
    """Flags of a command that starts a replica: examples first, then what is used most, help at the end."""
    parser.usage, parser.description = "%(prog)s [MODEL] [FLAGS]", examples
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.conflict_handler = "resolve"  # -h moves to the end
    groups = add_settings(parser)
    groups["logs and monitoring"].add_argument(
        "--log-level", default="info", choices=["debug", "info", "warning", "error"], help="(default: info)"
    )
    for title in (GATEWAY, SEVERAL):  # without a flag they are not shown
        groups[title] = parser.add_argument_group(title)
    parser.add_argument_group("help").add_argument("-h", "--help", action="help", help="show this page and end")
    return groups


def add_section(parser: argparse.ArgumentParser, section: str, *, leave_out: tuple[str, ...] = ()) -> None:
    group = parser.add_argument_group(f"{section} settings")
    for field in dataclasses.fields(_hints(Settings)[section]):
        if field.name not in leave_out:
            _add_flag(group, section, field.name)


def _add_flag(group: argparse._ArgumentGroup, section: str, name: str) -> None:
    cls = _hints(Settings)[section]
    field = cls.__dataclass_fields__[name]
    group.add_argument(
        flag(name),
        dest=f"{section}.{name}",
        default=argparse.SUPPRESS,
        help=f"{field.metadata['help']} (default: {default_of(field)})",
        **_parsing(_hints(cls)[name]),
    )


def settings_from(arguments: argparse.Namespace) -> Settings:
    file = read_config_file(arguments.config) if arguments.config else None
    values, flags = dict(file.values) if file else {}, set()
    if getattr(arguments, "settings", None) is not None:
        values = msgspec.json.decode(arguments.settings)
    if arguments.model is not None:
        values["model"] = arguments.model
        flags.add("model")
    for section in SECTIONS:
        given = section_from(arguments, section)
        flags |= {f"{section}.{name}" for name in given}
        if given and isinstance(values.get(section), dict | None):
            values[section] = (values.get(section) or {}) | given
    with file.located(flags) if file else nullcontext():
        return build(Settings, {name: value for name, value in values.items() if value is not None})


def section_from(arguments: argparse.Namespace, section: str) -> dict[str, Any]:
    """The settings of one section that were given as flags."""
    prefix = f"{section}."
    return {key.removeprefix(prefix): value for key, value in vars(arguments).items() if key.startswith(prefix)}


def flag(name: str) -> str:
    return "--" + name.removesuffix("_s").replace("_", "-")


def show(default: object) -> str:
    return "auto" if default is None else str(default)


def default_of(field: dataclasses.Field[Any]) -> str:
    return "none" if field.default is dataclasses.MISSING else show(field.default)


class _Pair(argparse.Action):
    """NAME=VALUE, as often as one likes."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        name, sign, value = values.partition("=")
        if not (name and sign and value):
            parser.error(f"{option}: expected {self.metavar}, not {values!r}")
        setattr(namespace, self.dest, getattr(namespace, self.dest, {}) | {name: value})


class _Added(argparse.Action):
    """One more of a list."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, []), values])


def members(kind: Any) -> tuple[Any, ...]:
    """The types a setting's value may have: `int | None` has two."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _parsing(kind: Any) -> dict[str, Any]:
    """Returns what argparse must know to read a value of this type."""
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is dict:
        return {"action": _Pair, "metavar": "NAME=VALUE"}
    if get_origin(kind) is list:
        return {"action": _Added, "metavar": "NAME"}
    plain = members(kind)[0]
    is_optional = type(None) in members(kind)

    def parse(text: str) -> Any:
        return None if is_optional and text in ("auto", "none") else plain(text)

    parse.__name__ = plain.__name__  # argparse names it in its errors
    return {"type": parse, "metavar": {int: "N", float: "X", str: "TEXT"}[plain]}


def _help(cls: type, name: str) -> str:
    return str(next(f.metadata["help"] for f in dataclasses.fields(cls) if f.name == name))
