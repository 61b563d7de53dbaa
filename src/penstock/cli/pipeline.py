"""`penstock pipeline`: files of pipelines, read and checked."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.config_file import read_config_file
from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from penstock.gateway.pipelines.graph import Pipeline
    from penstock.gateway.settings.gateway import GatewaySettings


def add_flags(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    check = verbs.add_parser(
        "check", help="whether a gateway would serve it: errors name the step, the edge and the line"
    )
    check.add_argument("file", type=Path, nargs="*", metavar="FILE", help="YAML: see docs/pipelines.md")
    check.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a gateway's configuration: its pipelines are checked too, and steps ask models that it has",
    )
    check.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> None:
    from penstock.gateway.pipelines.service import with_pipelines

    pipelines = load_pipelines(map(str, arguments.file))
    if arguments.config is not None:
        from penstock.core.config import build
        from penstock.gateway.settings.gateway import GatewaySettings, routes_of

        file = read_config_file(arguments.config)
        with file.located():
            settings = with_pipelines_beside(arguments.config, build(GatewaySettings, file.values))
            given = {pipeline.file.path.resolve() for pipeline in pipelines}
            pipelines += [one for one in load_pipelines(settings.pipelines) if one.file.path.resolve() not in given]
            with_pipelines(routes_of(settings.pools()), pipelines)
    elif not pipelines:
        raise ConfigError("there is nothing to check: FILE, or --config FILE of a gateway that has pipelines")
    _show(pipelines, as_json=arguments.json)


def with_pipelines_beside(config: Path, settings: GatewaySettings) -> GatewaySettings:
    """A gateway's settings whose pipelines are found from wherever it runs: their paths are relative to its file."""
    paths = [str(config.absolute().parent / Path(path).expanduser()) for path in settings.pipelines]
    return replace(settings, pipelines=paths)


def load_pipelines(paths: Iterable[str]) -> list[Pipeline]:
    """The pipelines of these files, checked. Raises ConfigError, about the setting that names the file."""
    from penstock.gateway.pipelines.checker import pipeline_from

    found = []
    for index, path in enumerate(paths):
        try:
            found.append(pipeline_from(read_config_file(Path(path))))
        except ConfigError as error:
            raise ConfigError(error.message, param=f"pipelines.{index}") from None
    return found


def _show(pipelines: list[Pipeline], *, as_json: bool) -> None:
    from penstock.cli.store_flags import print_json
    from penstock.gateway.pipelines.graph import ModelStep, PythonStep
    from penstock.terminal.tables import print_table

    if as_json:
        print_json([_document(pipeline) for pipeline in pipelines])
        return
    for pipeline in pipelines:
        print(f"{pipeline.name}: {pipeline.file.path} can be served; its answer is {pipeline.output}")
        rows = []
        for step in pipeline.root.walk():
            if step is pipeline.root:
                continue
            what = step.model if isinstance(step, ModelStep) else ""
            if isinstance(step, PythonStep):
                what = f"{step.entry.file.name}:{step.entry.function}"
            rows.append([step.name, step.kind, what, str(pipeline.kinds[step.where])])
        print_table(["step", "kind", "asks", "result"], rows)


def _document(pipeline: Pipeline) -> dict[str, object]:
    steps = [step for step in pipeline.root.walk() if step is not pipeline.root]
    return {
        "name": pipeline.name,
        "file": str(pipeline.file.path),
        "models": list(pipeline.models),
        "output": str(pipeline.output),
        "steps": [{"name": step.name, "kind": step.kind, "result": str(pipeline.kinds[step.where])} for step in steps],
    }
