"""The families of models, by the name their config carries. A new one is a file here and a line below."""

from __future__ import annotations

from penstock.model.families import (
    gemma2,
    gemma3,
    gpt_oss,
    llama,
    mistral,
    mixtral,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
)
from penstock.model.layers import Family

FAMILIES: dict[str, Family] = {
    "llama": llama.load,
    "mistral": mistral.load,
    "qwen2": qwen2.load,
    "qwen3": qwen3.load,
    "mixtral": mixtral.load,
    "qwen2_moe": qwen2_moe.load,
    "qwen3_moe": qwen3_moe.load,
    "gemma2": gemma2.load,
    "gemma3_text": gemma3.load,
    "phi3": phi3.load,
    "gpt_oss": gpt_oss.load,
    "qwen3_next": qwen3_next.load,
    "qwen3_5_text": qwen3_5.load,
    "qwen3_5_moe_text": qwen3_5.load,
}
