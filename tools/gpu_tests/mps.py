"""NVIDIA's MPS: processes that share a GPU run their kernels side by side, instead of in turns of milliseconds."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from penstock.link.parent_death import end_with_parent

_PROGRAM = "nvidia-cuda-mps-control"
_START_S = 60.0


def start_mps(directory: Path) -> None:
    """Before this process or another has touched the GPU: whoever comes later is a client. It ends with this process:
    to quit it earlier would wait for this process, which may be a client itself. Where there is none, none is."""
    if shutil.which(_PROGRAM) is None:
        return
    os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": str(directory), "CUDA_MPS_LOG_DIRECTORY": str(directory)}
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.Popen([_PROGRAM, "-f"], **silent, preexec_fn=lambda: end_with_parent(signal.SIGTERM))
    until_s = time.monotonic() + _START_S
    while not list(directory.iterdir()) and time.monotonic() < until_s:
        time.sleep(0.01)
