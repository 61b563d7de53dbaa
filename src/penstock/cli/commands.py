"""The commands of `penstock` as a table. The module of a command is imported when it is the one that is asked for:
it has `add_flags(parser)` and `run(arguments)`, and imports in `run` what is slow to import."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib import import_module
from typing import NamedTuple, Protocol, cast


class CommandModule(Protocol):
    def add_flags(self, parser: argparse.ArgumentParser, /) -> None: ...

    def run(self, arguments: argparse.Namespace) -> None: ...


class Command(NamedTuple):
    name: str
    module: str
    help: str

    def load(self) -> CommandModule:
        return cast(CommandModule, import_module(f"penstock.cli.{self.module}"))


GROUPS = {
    "serving": (
        Command("serve", "serve_command", "serve a model over the OpenAI API: all that one machine needs"),
        Command("engine", "engine_command", "one replica, an engine and its server, to stand behind a gateway"),
        Command("gateway", "gateway", "the public endpoint: keys, limits, queues, and replicas behind it"),
        Command("pipeline", "pipeline", "check a pipeline's file: steps, edges and their types, before it is served"),
        Command("epp", "epp", "an Endpoint Picker: Envoy-based gateways ask it where to send each request"),
        Command("doctor", "doctor", "check this installation, and say what to fix"),
    ),
    "models": (
        Command("pull", "pull", "fetch a model into the cache"),
        Command(
            "models",
            "models",
            "models on this machine's disk: list, fetch, remove, pin, verify; in a server's device: load, unload, park",
        ),
        Command("convert", "convert", "write a model in another format"),
        Command("quantize", "quantize", "make a model small, and report what it saves and costs"),
        Command("watermark", "watermark", "mark what is generated, and find the marks again"),
    ),
    "tenants": (
        Command("tenants", "tenants", "who may use the service, and how much"),
        Command("keys", "keys", "create, list, revoke and rotate API keys"),
        Command("usage", "usage", "what tenants used"),
        Command("admins", "admins", "who may administer over HTTP"),
    ),
    "fleet": (
        Command("fleet", "fleet", "the controller: the right number of replicas, in the right state; and why"),
        Command("top", "top", "the fleet in a terminal: replicas, load, KV cache, queues, alerts, tenants"),
        Command("replicas", "replica_commands", "add, drain, park, wake and remove replicas while gateways run"),
        Command("rollout", "rollout", "a new version takes over step by step, and goes back by itself if it is worse"),
        Command("routes", "routes", "how a model's traffic is shared between its versions"),
        Command("alerts", "alerts", "rules for Prometheus and a dashboard for Grafana; what each alert means"),
    ),
    "measuring and planning": (
        Command("bench", "bench", "measure servers under load, or one device"),
        Command("plan", "plan", "what hardware a model and a load need, what it costs, what costs less"),
        Command("sim", "sim", "a fleet under a trace, in simulated time"),
        Command(
            "replay",
            "replay",
            "what another policy would have done: routing by a decision log, or scaling by the store",
        ),
    ),
}


def all_commands() -> Iterator[Command]:
    for commands in GROUPS.values():
        yield from commands
