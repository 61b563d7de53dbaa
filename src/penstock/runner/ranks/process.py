"""The process of a rank that follows, started on this node: forked from the template where there is one."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from typing import TypeAlias

import msgspec

from penstock.api.relay import SECRET_VARIABLE as GATEWAY_SECRET_VARIABLE
from penstock.core.nodes import SECRET_VARIABLE
from penstock.link.forking import TEMPLATE_VARIABLE, CannotForkError, ForkedProcess, Spawn
from penstock.runner.ranks.messages import RankSpec

log = logging.getLogger("penstock.runner")

LocalProcess: TypeAlias = subprocess.Popen[bytes] | ForkedProcess

_MODULE = "penstock.engine_process.rank"


def start_rank(spec: RankSpec) -> LocalProcess:
    """It has the descriptors that its spec names, and no secret; it ends with the thread that calls this, or, forked,
    with this process."""
    secrets = (SECRET_VARIABLE, GATEWAY_SECRET_VARIABLE)
    environment = {name: value for name, value in os.environ.items() if name not in secrets}
    encoded, descriptors = msgspec.json.encode(spec).decode(), [spec.control, *spec.ways.descriptors]
    path = environment.get(TEMPLATE_VARIABLE, "off")
    if path != "off":
        places = [0, 1, 2, *descriptors]
        request = Spawn(_MODULE, [encoded], environment, os.getcwd(), places, signal.SIGKILL)
        try:
            return ForkedProcess(path, request, [subprocess.DEVNULL, 1, 2, *descriptors])
        except (OSError, CannotForkError) as error:
            log.warning("no rank can be forked from the template, so one is executed: %s", error)
    return subprocess.Popen(
        [sys.executable, "-m", _MODULE, encoded],
        stdin=subprocess.DEVNULL,
        env=environment,
        pass_fds=descriptors,
    )
