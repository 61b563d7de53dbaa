"""Pipelines for tests, from the text of their files."""

from __future__ import annotations

import textwrap
from pathlib import Path

from penstock.cli.config_file import read_config_file
from penstock.core.errors import ConfigError
from penstock.gateway.pipelines.checker import pipeline_from
from penstock.gateway.pipelines.graph import Pipeline


def written(directory: Path, text: str, **files: str) -> Pipeline:
    """`files`: beside the pipeline's, by their names without `.py`."""
    for name, source in files.items():
        (directory / f"{name}.py").write_text(textwrap.dedent(source))
    path = directory / "pipeline.yaml"
    path.write_text(textwrap.dedent(text))
    return pipeline_from(read_config_file(path))


def problem_of(directory: Path, text: str, **files: str) -> str:
    """Returns what is wrong with it, from the line on."""
    try:
        written(directory, text, **files)
    except ConfigError as error:
        return error.message.removeprefix(f"{directory / 'pipeline.yaml'}:")
    raise AssertionError("nothing is wrong with it")
