"""The process of a rank that follows, started on this node."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from penstock.runner.ranks.messages import RankSpec


def start_rank(spec: RankSpec) -> subprocess.Popen[bytes]:
    """It has the descriptors that its spec names, and ends with the thread that calls this."""
    return subprocess.Popen(
        [sys.executable, "-m", "penstock.engine_process.rank", msgspec.json.encode(spec).decode()],
        stdin=subprocess.DEVNULL,
        pass_fds=[spec.control, *spec.ways.descriptors],
    )
