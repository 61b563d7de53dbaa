"""The families of models, by the name their config carries. A new one is a file here and a line below."""

from __future__ import annotations

from penstock.model.families import llama, mistral, qwen2, qwen3
from penstock.model.layers import Family

FAMILIES: dict[str, Family] = {
    "llama": llama.load,
    "mistral": mistral.load,
    "qwen2": qwen2.load,
    "qwen3": qwen3.load,
}
