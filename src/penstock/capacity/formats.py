"""Number formats: how many bytes a value takes, and in which format a GPU multiplies it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.config import nearest
from penstock.core.errors import ConfigError

# Four bits in groups of 128 with a 16-bit scale and a zero point of their own; or in groups of 32 with a byte.
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1, "w8a8": 1, "int4": 0.53125, "mxfp4": 0.53125}
WEIGHTS = ("bf16", "fp8", "int8", "int4")
KV = ("bf16", "fp8")
LONG = {"bf16": "bfloat16", "fp16": "float16"}
SHORT = {long: short for short, long in LONG.items()}


@dataclass(frozen=True)
class Formats:
    """Number formats of linear weights (mxfp4: of experts), the KV cache, and `dtype`: activations, embedding, head."""

    weights: str = "bfloat16"
    kv: str = "bfloat16"
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return f"{SHORT.get(self.weights, self.weights)}, KV {SHORT.get(self.kv, self.kv)}"


def weight_format(name: str) -> str:
    return _named(name, WEIGHTS, "quant")


def kv_format(name: str) -> str:
    if name == "int8":
        raise ConfigError(
            "an int8 KV cache is for CPUs (`penstock serve --kv-dtype int8`); this plans GPUs, where 8 bits are fp8",
            param="kv",
        )
    return _named(name, KV, "kv")


def compute_format(weights: str, dtype: str, supported: frozenset[str]) -> str:
    """Returns the products' format. A GPU first widens weights that it cannot multiply: that saves bytes, not time."""
    return weights if weights in supported else dtype


def _named(name: str, known: tuple[str, ...], param: str) -> str:
    short = SHORT.get(name, name)
    if short not in known:
        hint = nearest(name, known)
        raise ConfigError(
            f"no number format {name!r} for {param}; there are {', '.join(known)}"
            + (f" (did you mean {hint!r}?)" if hint else ""),
            param=param,
        )
    return LONG.get(short, short)
