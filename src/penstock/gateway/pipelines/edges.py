"""The value that an edge leads to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.errors import StepFailed
from penstock.gateway.pipelines.graph import Edge
from penstock.gateway.pipelines.types import Label


def value_at(edge: Edge, values: Mapping[str, Any]) -> Any:
    """Raises StepFailed where a document does not have what its schema left open."""
    found = values[edge.name]
    for part in edge.path:
        try:
            found = getattr(found, str(part)) if isinstance(found, Label) else found[part]
        except (LookupError, TypeError, AttributeError):
            raise StepFailed(f"edge '{edge}': there is no '{part}' in this value", reason="no_value") from None
    return found
