"""Seed-OSS: a Llama with biases on q, k and v."""

from __future__ import annotations

from penstock.model.families.llama import load

__all__ = ["load"]
