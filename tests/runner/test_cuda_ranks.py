"""Two ranks of one model on one GPU: real processes, symmetric memory, CUDA graphs, against the reference's tokens.

The two share the card by NVIDIA's MPS, where it is installed: without it each waits for the other's time slice in every
collective.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.devices import NEEDS_GPU
from tests.runner.test_cuda_soak import on_gpu, soaked

pytestmark = NEEDS_GPU

_MPS = "nvidia-cuda-mps-control"


@pytest.fixture(scope="module", autouse=True)
def mps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Before this process or another has touched the GPU: whoever comes later is a client."""
    if shutil.which(_MPS) is None:
        yield
        return
    directory: Path = tmp_path_factory.mktemp("mps")
    os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": str(directory), "CUDA_MPS_LOG_DIRECTORY": str(directory)}
    subprocess.run([_MPS, "-d"], check=True)
    yield
    subprocess.run([_MPS], input="quit", text=True, check=True)


def test_two_ranks_say_what_one_would_and_leave_nothing_behind() -> None:
    soaked(replace(on_gpu(16), device="cuda tp=2"))
