"""Whether tests have a GPU to run on, found out without torch where the machine has none."""

from __future__ import annotations

import os
from functools import cache

import pytest


@cache
def has_gpu() -> bool:
    """Whether there is a GPU. If there may be one, torch is asked, which takes a second to import."""
    if not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg"))):
        return False
    import torch

    return torch.cuda.is_available()


NEEDS_GPU = pytest.mark.skipif(not has_gpu(), reason="needs a GPU")
