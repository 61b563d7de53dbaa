"""dots.llm1: a DeepSeek's experts under the attention of Qwen3."""

from __future__ import annotations

from penstock.model.families.qwen3_moe import load

__all__ = ["load"]
