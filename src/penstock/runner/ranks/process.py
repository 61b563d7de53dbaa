"""The process of a rank that follows, started on this node."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec

from penstock.api.relay import SECRET_VARIABLE as GATEWAY_SECRET_VARIABLE
from penstock.core.nodes import SECRET_VARIABLE
from penstock.runner.ranks.messages import RankSpec


def start_rank(spec: RankSpec) -> subprocess.Popen[bytes]:
    """It has the descriptors that its spec names, and no secret; it ends with the thread that calls this."""
    secrets = (SECRET_VARIABLE, GATEWAY_SECRET_VARIABLE)
    return subprocess.Popen(
        [sys.executable, "-m", "penstock.engine_process.rank", msgspec.json.encode(spec).decode()],
        stdin=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name not in secrets},
        pass_fds=[spec.control, *spec.ways.descriptors],
    )
