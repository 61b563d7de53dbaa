"""A YAML file of settings that knows its lines: what is wrong with a setting is told with its place."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    import yaml

_INSIDE = re.compile(r"at `\$([^`]*)`$")  # where in a setting's value msgspec found the fault: $[0].name
_INDEX = re.compile(r"\[([^]]*)\]")


@dataclass(frozen=True)
class ConfigFile:
    path: Path
    values: dict[str, Any]
    lines: dict[str, int]  # by setting: models.smollm2.replicas, models.smollm2.replicas.0

    @contextmanager
    def located(self, elsewhere: Collection[str] = ()) -> Iterator[None]:
        """Begin the message of a ConfigError about a setting of this file with FILE:LINE. Those in `elsewhere` are not
        this file's: flags win over it."""
        try:
            yield
        except ConfigError as error:
            if error.param is None or error.param in elsewhere:
                raise
            line = self._line_of(error)
            place = self.path if line is None else f"{self.path}:{line}"
            raise ConfigError(f"{place}: {error.message}", param=error.param) from None

    def _line_of(self, error: ConfigError) -> int | None:
        """Line of the setting, or of what it should be in."""
        inside = _INSIDE.search(error.message)
        name = str(error.param) + (_INDEX.sub(r".\1", inside[1]) if inside else "")
        while name and name not in self.lines:
            name = name.rpartition(".")[0]
        return self.lines.get(name)


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
