"""GGUF's blocks, kept as integers in groups, stand for exactly what the gguf package dequantizes them to."""

from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from penstock.hub.gguf_blocks import grouped
from tests.hub.gguf_random import BLOCKS, random_blocks


@pytest.mark.parametrize("name", BLOCKS)
def test_integers_in_groups_are_what_the_blocks_stand_for(name: str) -> None:
    type = GGMLQuantizationType[name]
    blocks = random_blocks(type, 6, 512)
    found = grouped(blocks, type, 6)
    assert found is not None
    expected = dequantize(blocks.reshape(6, -1), type).reshape(6, 512)
    np.testing.assert_allclose(found.widened(), expected, rtol=1e-6, atol=1e-7)


def test_types_of_other_kinds_are_left_to_others() -> None:
    assert grouped(np.zeros((1, 18), np.uint8), GGMLQuantizationType.IQ4_NL, 1) is None
