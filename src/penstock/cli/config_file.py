"""A YAML file of settings, read with its lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.config_file import ConfigFile
from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    import yaml


def read_config_file(path: Path) -> ConfigFile:
    import yaml  # not everywhere that a command runs without a file

    try:
        loader = yaml.SafeLoader(path.read_text())
        node = loader.get_single_node()
        lines = dict(_lines(node, path)) if node is not None else {}
        document = loader.construct_document(node) if node is not None else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path
        raise ConfigError(f"{place}: this is not YAML: {error.problem or error.context}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise ConfigError(f"cannot read {path}: {said}") from None
    except RecursionError:
        raise ConfigError(f"cannot read {path}: it is nested too deeply") from None
    if not isinstance(document, dict | None):
        raise ConfigError(f"{path} does not hold settings but a {type(document).__name__}")
    return ConfigFile(path, document or {}, lines)


def _lines(node: yaml.Node, path: Path, name: str = "", above: tuple[yaml.Node, ...] = ()) -> Iterator[tuple[str, int]]:
    """Every setting below `node`, by its whole name. A key that is there twice is an error: YAML keeps the last."""
    import yaml

    if node in above:  # an alias of what it is in
        return
    seen: dict[str, int] = {}
    children: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        children = [(str(key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(str(index), value, value) for index, value in enumerate(node.value)]
    for key, place, value in children:
        line = place.start_mark.line + 1
        if key in seen and key != "<<":
            raise ConfigError(f"{path}:{line}: '{name}{key}' is there already, in line {seen[key]}")
        seen[key] = line
        yield f"{name}{key}", line
        yield from _lines(value, path, f"{name}{key}.", (*above, node))
