"""NVIDIA's MPS: processes that share a GPU run their kernels side by side, instead of in turns of milliseconds.

Its price: a kernel's fault ends all processes on the card, and not only its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from penstock.link.parent_death import end_with_parent

_PROGRAM = "nvidia-cuda-mps-control"
_DIRECTORY_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
_START_S = 60.0


def start_mps(directory: Path) -> bool:
    """Whether processes that this one starts from now on share a GPU by MPS: the machine's, if its operator has named
    one, or one of this process's own, which ends with it. Called before this process or another has touched the GPU.
    Nothing quits it earlier: that would wait for this process, which may be a client itself."""
    if _DIRECTORY_VARIABLE in os.environ:
        return True
    if shutil.which(_PROGRAM) is None:
        return False
    variables = {_DIRECTORY_VARIABLE: str(directory), "CUDA_MPS_LOG_DIRECTORY": str(directory)}
    daemon = subprocess.Popen(
        [_PROGRAM, "-f"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | variables,
        preexec_fn=lambda: end_with_parent(signal.SIGTERM),
    )
    until_s = time.monotonic() + _START_S
    while not any(directory.iterdir()):
        if daemon.poll() is not None or time.monotonic() >= until_s:
            return False
        time.sleep(0.01)
    os.environ |= variables
    return True
