"""Templates of a pipeline: Jinja2 in a sandbox, with the edges that they contain. Pure.

The text is the operator's, the values are a client's or a model's: they are filled in, never read as a template.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
from jinja2 import StrictUndefined, TemplateError, nodes
from jinja2 import Template as Compiled
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.core.errors import ConfigError, StepFailed
from penstock.gateway.pipelines.edges import Edge
from penstock.gateway.pipelines.types import Label, as_text

MAX_CHARS = 4 << 20  # of a text that is made


@dataclass(frozen=True)
class TemplateEdge:
    """An edge in a template, as far as it can be told without running it."""

    edge: Edge
    line: int  # in the template
    loops: tuple[tuple[str, Edge], ...] = ()  # names that stand for elements of what these lead to


@dataclass(frozen=True)
class Template:
    source: str
    edges: frozenset[TemplateEdge]

    def render(self, values: Mapping[str, Any]) -> str:
        """Raises StepFailed."""
        try:
            parts, num_chars = [], 0
            for part in _compiled(self.source).generate(values):
                num_chars += len(part)
                if num_chars > MAX_CHARS:
                    raise StepFailed(f"the text is longer than {MAX_CHARS >> 20} Mi characters", reason="too_large")
                parts.append(part)
            return "".join(parts)
        except (TemplateError, ArithmeticError, TypeError, ValueError, LookupError, RecursionError) as error:
            raise StepFailed(f"the template cannot be filled in: {error}", reason="template") from None


def _finalized(value: object) -> object:
    """Texts and labels as they are, everything else as JSON."""
    return as_text(value) if isinstance(value, Label | dict | list | tuple) else value


class _Environment(ImmutableSandboxedEnvironment):
    def getattr(self, obj: Any, attribute: str) -> Any:
        """A field of a document comes before a method of Python's that has its name: `order.items`."""
        return obj[attribute] if isinstance(obj, dict) and attribute in obj else super().getattr(obj, attribute)


def _environment() -> ImmutableSandboxedEnvironment:
    found = _Environment(undefined=StrictUndefined, finalize=_finalized, trim_blocks=True, lstrip_blocks=True)
    found.filters["tojson"] = _as_json
    return found


def _as_json(value: object) -> str:
    return msgspec.json.encode(value).decode()


_ENVIRONMENT = _environment()


@lru_cache(maxsize=512)
def _compiled(source: str) -> Compiled:
    return _ENVIRONMENT.from_string(source)


def parse(source: str) -> Template:
    """Raises ConfigError."""
    try:
        tree = _ENVIRONMENT.parse(source)
        _compiled(source)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        at = f"line {line} of the template: " if line else "the template: "
        raise ConfigError(f"{at}{error}") from None
    return Template(source, frozenset(_edges(tree, {})))


def _edges(node: nodes.Node, loops: dict[str, Edge | None]) -> Iterator[TemplateEdge]:
    """Paths below `node` that begin outside the template. `loops`: names that it binds itself, with the list whose
    elements they are, where that is a path."""
    if isinstance(node, nodes.For):
        yield from _edges(node.iter, loops)
        names = [one.name for one in node.target.find_all(nodes.Name)]
        names += [node.target.name] if isinstance(node.target, nodes.Name) else []
        over = _path(node.iter)
        inner = loops | dict.fromkeys((*names, "loop"))
        if isinstance(node.target, nodes.Name) and over is not None and inner.get(over.name, over) is not None:
            inner[node.target.name] = over
        for one in (*node.body, *([node.test] if node.test is not None else ())):
            yield from _edges(one, inner)
        for one in node.else_:
            yield from _edges(one, loops)
        return
    if isinstance(
        node, nodes.Macro | nodes.CallBlock | nodes.Import | nodes.FromImport | nodes.Include | nodes.Extends
    ):
        raise ConfigError("a template of a step has no macros and includes nothing")
    if isinstance(node, nodes.Assign):
        yield from _edges(node.node, loops)
        for own in (node.target, *node.target.find_all(nodes.Name)):
            if isinstance(own, nodes.Name):
                loops[own.name] = None  # what it is like is not looked at
        return
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):  # a method of a value
        for inside in (node.node.node, *node.args, *(keyword.value for keyword in node.kwargs)):
            yield from _edges(inside, loops)
        return
    found = _path(node)
    if found is not None:
        if loops.get(found.name, found) is not None and found.name not in _ENVIRONMENT.globals:
            known = tuple((key, value) for key, value in loops.items() if value is not None)
            yield TemplateEdge(found, node.lineno, known)
        return
    for child in node.iter_child_nodes():
        yield from _edges(child, loops)


def _path(node: nodes.Node) -> Edge | None:
    path: list[str | int] = []
    while True:
        if isinstance(node, nodes.Name):
            return Edge(node.name, tuple(reversed(path)))
        if isinstance(node, nodes.Getattr):
            path.append(node.attr)
            node = node.node
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
            path.append(node.arg.value)
            node = node.node
        else:
            return None
