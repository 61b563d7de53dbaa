"""Edges: paths of values, such as `input.text`, `language.label` or `facts.items[0].name`, and what they lead to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import StepFailed
from penstock.gateway.pipelines.types import Label


@dataclass(frozen=True)
class Edge:
    """Path of a value: a name that a step sees, and fields and elements below it."""

    name: str
    path: tuple[str | int, ...] = ()

    def __str__(self) -> str:
        return self.name + "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in self.path)


def value_at(edge: Edge, values: Mapping[str, Any]) -> Any:
    """Raises StepFailed where a document does not have what its schema left open."""
    found = values[edge.name]
    for part in edge.path:
        try:
            found = getattr(found, str(part)) if isinstance(found, Label) else found[part]
        except (LookupError, TypeError, AttributeError):
            raise StepFailed(f"edge '{edge}': there is no '{part}' in this value", reason="no_value") from None
    return found
