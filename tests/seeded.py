"""Random numbers that are the same in every run: a directory whose tests draw from torch imports the fixture into its
conftest.py. Torch is imported by the first test that is seeded: every worker reads every conftest.py."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING

import hypothesis
import numpy as np
import pytest

if TYPE_CHECKING:
    import torch


class _TorchRandom:
    """Torch's global generator as Hypothesis wants one, which then begins each example with the same numbers. Nothing
    where torch is not imported."""

    def seed(self, seed: int) -> None:
        if "torch" in sys.modules:
            seed_torch(seed)

    def getstate(self) -> torch.Tensor | None:
        return sys.modules["torch"].get_rng_state() if "torch" in sys.modules else None

    def setstate(self, state: torch.Tensor | None) -> None:
        if state is not None:
            sys.modules["torch"].set_rng_state(state)


_TORCH = _TorchRandom()  # Hypothesis holds it weakly
hypothesis.register_random(_TORCH)


def seed_torch(seed: int) -> None:
    """Seeds torch. Without a GPU `torch.manual_seed` writes down the stack of each call for the day when there is one,
    which takes milliseconds."""
    import torch

    if torch.cuda.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test begins with the same random numbers, whichever ran before it."""
    seed_torch(0)
    np.random.seed(0)
    random.seed(0)
