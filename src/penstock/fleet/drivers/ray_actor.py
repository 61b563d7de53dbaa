"""The actor of a replica on Ray: it starts the engine's process with the devices that Ray assigned, and is its lease.

An engine never outlives its actor, and an actor never outlives its raylet. Ray would else count GPUs as free that an
engine still holds: a raylet that is killed was seen to leave both behind. Requests and health never come this way.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TypedDict

from penstock.api.relay import SECRET_VARIABLE

_LOOK_S = 0.5
_BEGIN_S = 120.0  # an actor that is told nothing for so long was left by a controller that died
_AGAIN_S = 5.0  # for an engine that was told twice to end
_TAIL_BYTES = 2000


class NodePlace(TypedDict):
    """One node of an engine over several."""

    count: int
    rank: int
    first: str  # address of the first, as the actor there said (`reserve`)


class ReplicaActor:
    """Its methods are called by several threads of Ray's."""

    def __init__(self, log_name: str) -> None:
        import ray  # none but Ray's own processes make actors

        self._host = str(ray.util.get_node_ip_address())
        self._directory = Path(tempfile.mkdtemp(prefix="penstock-"))
        self._log_path = Path(ray._private.worker._global_node.get_logs_dir_path()) / f"{log_name}.log"
        self._raylet = os.getppid()
        self._told, self._begun = threading.Event(), threading.Lock()
        self._engine: subprocess.Popen[bytes] | None = None
        self._lease = -1
        self._reserved: socket.socket | None = None
        threading.Thread(target=self._watch, daemon=True).start()

    def reserve(self) -> str:
        """An address of this node at which its engine can meet those of others: the port stays its own."""
        with self._begun:
            if self._reserved is None:
                self._reserved = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET)
                self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the engine binds it, too
                self._reserved.bind((self._host, 0))
            port = self._reserved.getsockname()[1]
            return f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"

    def begin(self, config: str, secret: str, place: NodePlace | None = None) -> None:
        """Starts the engine, unless that was done before: all of it, or its part on this node. The secret is an
        argument here and not of the constructor: Ray keeps those of constructors, also on disk."""
        with self._begun:
            if self._engine is None:
                self._engine = self._start(config, secret, place)
                self._told.set()

    def status(self) -> dict[str, str | bool]:
        engine = self._engine
        failure = ""
        if engine is not None and (code := engine.poll()) is not None:
            failure = self._last_words() or f"its process ended with status {code}"
        return {"is_begun": engine is not None, "url": self._url(), "failure": failure}

    def stop(self, grace_s: float) -> None:
        """Returns when the engine and its children have ended."""
        if (engine := self._engine) is not None:
            for seconds in (grace_s, _AGAIN_S):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    engine.terminate()
                    engine.wait(seconds)
            self._kill(engine)
            engine.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self, config: str, secret: str, place: NodePlace | None) -> subprocess.Popen[bytes]:
        path = self._directory / "config.json"
        path.write_text(config)  # the directory is this user's alone
        held, self._lease = os.pipe()
        arguments = ["engine", "--config", str(path), "--address-file", str(self._directory / "address.json")]
        arguments += ["--host", self._host, "--port", "0", "--lease-fd", str(held), "--log-level", "warning"]
        if place is not None:
            arguments += ["--nnodes", str(place["count"]), "--node-rank", str(place["rank"])]
            arguments += ["--master-addr", place["first"], "--node-host", self._host]
        with open(self._log_path, "ab", opener=_private) as log:
            engine = subprocess.Popen(
                [sys.executable, "-m", "penstock.cli.main", *arguments],
                env=os.environ | {SECRET_VARIABLE: secret},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[held],
                start_new_session=True,
            )
        os.close(held)
        return engine

    def _watch(self) -> None:
        """Ends this process where its raylet has ended, or nobody has begun anything."""
        until_s = time.monotonic() + _BEGIN_S
        while os.getppid() == self._raylet and (self._told.is_set() or time.monotonic() < until_s):
            time.sleep(_LOOK_S)
        if self._engine is not None:
            self._kill(self._engine)
        shutil.rmtree(self._directory, ignore_errors=True)
        os._exit(1)

    @staticmethod
    def _kill(engine: subprocess.Popen[bytes]) -> None:
        """The whole session: what the engine's server started, too."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(engine.pid, signal.SIGKILL)

    def _url(self) -> str:
        with contextlib.suppress(OSError, ValueError, KeyError):
            return str(json.loads((self._directory / "address.json").read_bytes())["url"])
        return ""

    def _last_words(self) -> str:
        with contextlib.suppress(OSError), open(self._log_path, "rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").strip().splitlines()
            return lines[-1].strip() if lines else ""
        return ""


def _private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)
