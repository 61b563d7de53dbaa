"""SmolLM3: a Llama of whose layers every fourth is not rotated, which `ModelConfig.unrotated_layers` says."""

from __future__ import annotations

from penstock.model.families.llama import load

__all__ = ["load"]
