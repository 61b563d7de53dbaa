"""The families of models, by the name their config carries. A new one is a file here and a line below."""

from __future__ import annotations

from penstock.model.families import (
    deepseek,
    gemma2,
    gemma3,
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    llama,
    llama4,
    mistral,
    mixtral,
    olmo2,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
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
    "llama4_text": llama4.load,
    "granite": granite.load,
    "granitemoe": granite.load,
    "granitemoeshared": granite.load,
    "granitemoehybrid": granite.load,
    "olmo2": olmo2.load,
    "olmo3": olmo2.load,
    "olmoe": olmoe.load,
    "glm": glm4.load_glm,
    "glm4": glm4.load,
    "glm4_moe": glm4_moe.load,
    "deepseek_v2": deepseek.load,
    "deepseek_v3": deepseek.load,
    "kimi_k2": deepseek.load,
    "glm4_moe_lite": deepseek.load,
}
