"""Blocks of every kind that GGUF keeps integers in, filled with anything."""

from __future__ import annotations

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def random_blocks(type: GGMLQuantizationType, rows: int, columns: int, *, seed: int = 3) -> np.ndarray:
    """Any bytes are integers; only the scales, which are halves, must not be infinite."""
    values, size = GGML_QUANT_SIZES[type]
    blocks = np.random.default_rng(seed).integers(0, 256, (rows * columns // values, size), dtype=np.uint8)
    scales = np.random.default_rng(seed + 1).normal(0, 0.01, (len(blocks), 2)).astype(np.float16).view(np.uint8)
    if type.name in ("Q3_K", "Q6_K"):
        blocks[:, -2:] = scales[:, :2]
    elif type.name == "Q2_K":
        blocks[:, -4:] = scales
    else:
        count = 4 if type.name.endswith(("1", "4_K", "5_K")) else 2
        blocks[:, :count] = scales[:, :count]
    return blocks
