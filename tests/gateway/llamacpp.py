"""llama.cpp's own server with the default model: small, and real."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.hub.sources import pull
from tests.waiting import GIVE_UP_S

_SERVE = """
import signal, sys
from xllamacpp import CommonParams, Server
params = CommonParams()
params.model.path, params.port = sys.argv[1], int(sys.argv[2])
params.endpoint_metrics = params.endpoint_slots = True
params.n_parallel, params.n_ctx, params.verbosity = 2, 1024, 0
params.cpuparams.n_threads = 1  # two that wait for each other are slow beside other processes
server = Server(params)
signal.pause()
"""


@dataclass
class LlamaCpp:
    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def llamacpp_serving(port: int = 0) -> Iterator[LlamaCpp]:
    with socket.socket() as held:  # bound and not listening, as long as it runs: nobody else gets the port
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", port))
        port = held.getsockname()[1]
        model = str(pull("smollm2", progress=lambda *_: None))
        process = subprocess.Popen([sys.executable, "-c", _SERVE, model, str(port)], env=os.environ)
        try:
            yield LlamaCpp(port, process)
        finally:
            process.terminate()
            process.wait(GIVE_UP_S)
