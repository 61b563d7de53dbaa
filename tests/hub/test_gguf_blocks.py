"""GGUF's blocks, kept as integers in groups, stand for exactly what the gguf package dequantizes them to."""

from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from penstock.hub.gguf_blocks import grouped

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


def random_blocks(type: GGMLQuantizationType, rows: int, columns: int) -> np.ndarray:
    """Any bytes are integers; only the scales, which are halves, must not be infinite."""
    values, size = GGML_QUANT_SIZES[type]
    blocks = np.random.default_rng(3).integers(0, 256, (rows * columns // values, size), dtype=np.uint8)
    scales = np.random.default_rng(4).normal(0, 0.01, (len(blocks), 2)).astype(np.float16).view(np.uint8)
    if type.name == "Q6_K":
        blocks[:, -2:] = scales[:, :2]
    else:
        blocks[:, : 4 if type.name.endswith(("1", "4_K", "5_K")) else 2] = scales[
            :, : 4 if type.name.endswith(("1", "4_K", "5_K")) else 2
        ]
    return blocks


@pytest.mark.parametrize("name", TYPES)
def test_integers_in_groups_are_what_the_blocks_stand_for(name: str) -> None:
    type = GGMLQuantizationType[name]
    blocks = random_blocks(type, 6, 512)
    found = grouped(blocks, type, 6)
    assert found is not None
    expected = dequantize(blocks.reshape(6, -1), type).reshape(6, 512)
    np.testing.assert_allclose(found.widened(), expected, rtol=1e-6, atol=1e-7)


def test_types_of_other_kinds_are_left_to_others() -> None:
    assert grouped(np.zeros((1, 18), np.uint8), GGMLQuantizationType.IQ4_NL, 1) is None
