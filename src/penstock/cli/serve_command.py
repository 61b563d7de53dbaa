"""`penstock serve MODEL`: a replica for one machine, or several of them behind a gateway."""

from __future__ import annotations

import argparse

from penstock.cli.flags import GATEWAY, MOST_USED, add_replica_flags, settings_from
from penstock.core.errors import ConfigError

_EXAMPLES = """\
examples:
  penstock serve                                   # a small model, at http://127.0.0.1:8000
  penstock serve hf:Qwen/Qwen3-8B --port 9000      # a model of the Hugging Face Hub
  penstock serve model.gguf --max-model-len 8192   # a file; a shorter context takes less memory
  penstock serve --replicas 2                      # two of it behind a gateway"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    groups = add_replica_flags(parser, _EXAMPLES)
    groups[MOST_USED].add_argument(
        "--replicas", type=int, default=1, metavar="N", help="with more than one, behind a gateway (default: 1)"
    )
    groups[GATEWAY].add_argument(
        "--processes", type=int, default=1, metavar="N", help="workers that share its port (default: 1)"
    )


def run(arguments: argparse.Namespace) -> None:
    if arguments.replicas > 1:
        from penstock.cli.replicas import serve_replicas

        serve_replicas(settings_from(arguments), arguments.replicas, arguments.processes)
    elif arguments.processes > 1:
        raise ConfigError("--processes is for the gateway of --replicas: there is none in front of one replica")
    else:
        from penstock.cli.serve import serve

        serve(settings_from(arguments), has_console=True)
