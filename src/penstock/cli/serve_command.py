"""`penstock serve MODEL`: a replica for one machine, or several of them behind a gateway."""

from __future__ import annotations

import argparse
import os

from penstock.cli.flags import GATEWAY, MOST_USED, add_replica_flags, settings_from
from penstock.core.errors import ConfigError
from penstock.core.nodes import nodes_of

_EXAMPLES = """\
examples:
  penstock serve                                   # a small model, at http://127.0.0.1:8000
  penstock serve hf:Qwen/Qwen3-8B --port 9000      # a model of the Hugging Face Hub
  penstock serve model.gguf --max-model-len 8192   # a file; a shorter context takes less memory
  penstock serve --replicas 2                      # two of it behind a gateway
  penstock serve --replicas 1..4                   # as many as the demand needs"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    groups = add_replica_flags(parser, _EXAMPLES)
    groups[MOST_USED].add_argument(
        "--replicas",
        type=_range,
        default=(1, 1),
        metavar="N|MIN..MAX",
        help="with more than one, behind a gateway; a range: as many as the demand needs (default: 1)",
    )
    groups[GATEWAY].add_argument(
        "--processes", type=int, default=1, metavar="N", help="workers that share its port (default: 1)"
    )


def run(arguments: argparse.Namespace) -> None:
    fewest, most = arguments.replicas
    settings = settings_from(arguments)
    if (fewest < most or most > 1) and nodes_of(settings.engine, os.environ).count > 1:
        raise ConfigError(
            "--replicas are of one machine each: start those over several nodes one by one, and a gateway for them",
            param="nnodes",
        )
    if fewest < most:
        from penstock.cli.serve_fleet import serve_range

        serve_range(settings, fewest, most, arguments.processes)
    elif most > 1:
        from penstock.cli.replicas import serve_replicas

        serve_replicas(settings, most, arguments.processes)
    elif arguments.processes > 1:
        raise ConfigError("--processes is for the gateway of --replicas: there is none in front of one replica")
    else:
        from penstock.cli.serve import serve

        serve(settings, has_console=True)


def _range(text: str) -> tuple[int, int]:
    fewest, _, most = text.partition("..")
    try:
        found = int(fewest), int(most or fewest)
    except ValueError:
        found = 0, 0
    if not 0 <= found[0] <= found[1] or not found[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor a range such as 1..4")
    return found
