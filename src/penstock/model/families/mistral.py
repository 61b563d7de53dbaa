"""Mistral: a Llama whose layers may see only a window of the tokens before them, which `ModelConfig.windows` says."""

from __future__ import annotations

from penstock.model.families.llama import load

__all__ = ["load"]
