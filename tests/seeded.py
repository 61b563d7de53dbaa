"""Random numbers that are the same in every run: a directory whose tests draw from torch imports the fixture into its
conftest.py."""

from __future__ import annotations

import random

import hypothesis
import numpy as np
import pytest
import torch


class _TorchRandom:
    """Torch's global generator as Hypothesis wants one, which then begins each example with the same numbers."""

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def getstate(self) -> torch.Tensor:
        return torch.get_rng_state()

    def setstate(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


_TORCH = _TorchRandom()  # Hypothesis holds it weakly
hypothesis.register_random(_TORCH)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test begins with the same random numbers, whichever ran before it."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
