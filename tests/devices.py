"""The device of kernels' tests: a GPU, or where there is none Triton's interpreter (tests/conftest.py chooses it).

The interpreter runs kernels block by block on numpy, and cannot run all of them. Tests that it cannot run are skipped
for one of the reasons here; `tests/model/ops/triton/test_triton_compiles.py` compiles all of them without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import pytest
import torch

from tests.gpu import NEEDS_GPU as NEEDS_GPU
from tests.gpu import has_gpu

T = TypeVar("T")

IS_INTERPRETED = not has_gpu()
DEVICE = "cpu" if IS_INTERPRETED else "cuda"

# What the interpreter cannot run. Kernels that are instructions of a GPU's own (`lanes`: products of a few rows with
# integers, `int8` for a few rows) have a plainer twin there, and early starts (`launch.wait`) are left out.
NEEDS_FP8 = pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter has no FP8")
NEEDS_BFLOAT16 = pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter cuts where hardware rounds to bfloat16")
NEEDS_INSTRUCTIONS = pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter has no instructions of a GPU's own")
NEEDS_SPEED = pytest.mark.skipif(IS_INTERPRETED, reason="too large for the interpreter")
BFLOAT16 = pytest.param(torch.bfloat16, marks=NEEDS_BFLOAT16)

SLOW_INTERPRETED = pytest.mark.slow if IS_INTERPRETED else pytest.mark.usefixtures()


def slow(*values: object) -> Any:
    """A parameter that is tried with the slow tests only."""
    return pytest.param(*values, marks=pytest.mark.slow)


def matrix(on_gpu: Sequence[T], interpreted: Sequence[T]) -> list[T]:
    """Parameters of a test: all of them on a GPU; where they are interpreted, those that take another way each."""
    return list(interpreted if IS_INTERPRETED else on_gpu)
