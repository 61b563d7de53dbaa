"""`penstock serve MODEL`: a replica for one machine, or several of them behind a gateway."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import get_args

from penstock.cli.flags import GATEWAY, MOST_USED, SEVERAL, add_replica_flags, settings_from
from penstock.cli.model_names import NamedModel, name_and_model
from penstock.cli.replica_counts import FORMS, ReplicaCounts, check_counts, replica_counts
from penstock.core.errors import ConfigError
from penstock.core.nodes import nodes_of
from penstock.core.settings import Settings
from penstock.router.legs import Split

_EXAMPLES = """\
examples:
  penstock serve                                   # a small model, at http://127.0.0.1:8000
  penstock serve hf:Qwen/Qwen3-8B --port 9000      # a model of the Hugging Face Hub
  penstock serve model.gguf --max-model-len 8192   # a file; a shorter context takes less memory
  penstock serve --replicas 2                      # two of it behind a gateway
  penstock serve --replicas 1..4                   # as many as the demand needs
  penstock serve --replicas prefill=1,decode=2     # long prompts apart from answers
  penstock serve smollm2 code=hf:Qwen/Qwen3-8B     # several models behind one address
  penstock serve smollm2 --pipeline support.yaml   # and steps that ask it, behind another name"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    groups = add_replica_flags(parser, _EXAMPLES)
    parser.usage = "%(prog)s [MODEL | NAME=MODEL ...] [FLAGS]"
    parser.add_argument(
        "others", nargs="*", metavar="NAME=MODEL", help="more models behind the same address, each under its name"
    )
    groups[SEVERAL].add_argument(
        "--models", type=Path, metavar="FILE", help="YAML file of several models and how they share the device's memory"
    )
    groups[MOST_USED].add_argument(
        "--replicas",
        type=replica_counts,
        default=ReplicaCounts(1, 1),
        metavar=FORMS,
        help="with more than one, behind a gateway; a range: as many as the demand needs; roles, as in "
        "prefill=1,decode=2: prompts are computed apart from answers where that gains (default: 1)",
    )
    groups[GATEWAY].add_argument(
        "--pipeline",
        action="append",
        default=[],
        metavar="FILE",
        help="a pipeline whose steps ask these models; again for more; SIGHUP reads them again; see docs/pipelines.md",
    )
    groups[GATEWAY].add_argument(
        "--split",
        choices=get_args(Split),
        default="auto",
        help="whether another replica computes a prompt than the one that answers it: auto, where that gains; always, "
        "to try it out; never (default: auto)",
    )
    groups[GATEWAY].add_argument(
        "--processes", type=int, default=1, metavar="N", help="workers that share its port (default: 1)"
    )


def run(arguments: argparse.Namespace) -> None:
    counts: ReplicaCounts = arguments.replicas
    named = [name_and_model(text) for text in (arguments.model, *arguments.others) if text is not None]
    if arguments.models is not None or len(named) > 1:
        arguments.model = None
        _run_several(arguments, settings_from(arguments), named)
        return
    if named and named[0].name is not None:
        arguments.model = named[0].model
        vars(arguments)["server.name"] = named[0].name
    settings = settings_from(arguments)
    check_counts(settings, counts)
    pipelines: list[str] = arguments.pipeline
    if (counts.most > 1 or pipelines) and nodes_of(settings.engine, os.environ).count > 1:
        raise ConfigError(
            "--replicas and --pipeline are for one machine: start those over several nodes one by one, and a gateway",
            param="nnodes",
        )
    if arguments.split != "auto" and (counts.is_range or counts.most == 1):
        raise ConfigError("--split is for a number of --replicas, or roles: there is nobody to share a prompt with")
    if counts.is_range:
        from penstock.cli.serve_fleet import serve_range

        serve_range(settings, counts.fewest, counts.most, arguments.processes, pipelines)
    elif counts.most > 1 or pipelines:
        from penstock.cli.replicas import serve_replicas

        serve_replicas(settings, counts, arguments.processes, arguments.split, pipelines)
    elif arguments.processes > 1:
        raise ConfigError("--processes is for a gateway: there is none in front of one replica without pipelines")
    else:
        from penstock.cli.serve import serve

        serve(settings, has_console=True)


def _run_several(arguments: argparse.Namespace, settings: Settings, named: list[NamedModel]) -> None:
    if arguments.replicas.most > 1:
        raise ConfigError("--replicas are of one model; several models have one each")
    from penstock.cli.serve_models import read_models, serve_models

    serve_models(settings, read_models(settings, named, arguments.models), arguments.processes, arguments.pipeline)
