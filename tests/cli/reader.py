"""Somebody who follows a page word for word: its commands on real processes, with ports that the system picks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from tests.home import link_caches
from tests.waiting import GIVE_UP_S, eventually

T = TypeVar("T")

_ADDRESS = re.compile(r"at http://127\.0\.0\.1:(\d+)")
_BLOCK = re.compile(r"```(sh|yaml)\n(.*?)```|(Stop )", re.DOTALL)
_SERVERS = ("penstock serve", "penstock engine", "penstock gateway")


class Reader:
    """A user with a terminal for each server, in a directory of their own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        programs = directory / "bin"
        programs.mkdir()
        for name, module in (("penstock", "-m penstock.cli.main "), ("python", "")):
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module}"$@"\n')
            program.chmod(0o755)
        self._environment = os.environ | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PENSTOCK_HOME": str(directory / "home"),
            "PYTHONUNBUFFERED": "1",
        }
        self._ports: dict[str, str] = {}  # as the page has it: as the system picked it
        self.servers: list[subprocess.Popen[bytes]] = []
        (directory / "home").mkdir()
        link_caches(directory / "home")

    def follow(self, page: str) -> dict[str, str]:
        """Starts servers, runs commands and writes files in the order of the page. Returns what commands printed."""
        printed: dict[str, str] = {}
        for kind, block, stop in _BLOCK.findall(page):
            if stop:
                self.stop()
            elif kind == "yaml":
                self.write(block)
            elif block.startswith(_SERVERS):
                self.start(block.strip())
            else:
                printed |= {line: self.run(line) for line in block.strip().splitlines()}
        return printed

    def url(self, port: int) -> str:
        """Returns the URL of the server that the page has at this port."""
        return f"http://127.0.0.1:{self._ports[str(port)]}"

    def write(self, block: str) -> None:
        name = block.splitlines()[0].removeprefix("# ")
        (self.directory / name).write_text(self._with_ports(block))

    def run(self, command: str) -> str:
        done = subprocess.run(
            ["sh", "-c", self._with_ports(command)],
            cwd=self.directory,
            env=self._environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def start(self, command: str) -> None:
        written = re.search(r"--port (\d+)", command)
        port = written[1] if written else "8000"
        log = self.directory / f"server-{len(self.servers)}.log"
        for file in re.findall(r"--config (\S+)", command):
            config = self.directory / file
            config.write_text(self._with_ports(config.read_text()))
        line = "exec " + command.replace(f" --port {port}", "") + " --port 0"
        with log.open("wb") as output:
            self.servers.append(
                subprocess.Popen(
                    ["sh", "-c", line],
                    cwd=self.directory,
                    env=self._environment,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )
        found = self._wait_for(command, lambda: _ADDRESS.search(log.read_text()))
        assert found is not None
        self._ports[port] = found[1]
        self._wait_for(command, lambda: _is_ready(f"http://127.0.0.1:{found[1]}"))

    def _wait_for(self, command: str, look: Callable[[], T]) -> T:
        """Returns what `look` found of the last server. A failure tells what the servers have printed."""
        try:
            found, _ = eventually(
                lambda: (look(), self.servers[-1].poll()), lambda seen: seen[0] or seen[1] is not None
            )
            assert found, f"`{command}` ended with {self.servers[-1].poll()}"
            return found
        except AssertionError as error:
            for log in sorted(self.directory.glob("server-*.log")):
                error.add_note(f"{log.name}:\n{log.read_text()}")
            raise

    def log(self) -> str:
        """Returns what the last server has written."""
        return (self.directory / f"server-{len(self.servers) - 1}.log").read_text()

    def stop(self) -> None:
        for server in self.servers:
            server.send_signal(signal.SIGINT)
        for server in self.servers:
            server.wait()
        self.servers = []

    def _with_ports(self, text: str) -> str:
        for written, picked in self._ports.items():
            text = re.sub(rf"(localhost|127\.0\.0\.1):{written}\b", rf"\1:{picked}", text)
        return text


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=GIVE_UP_S):
            return True
    except OSError:
        return False


@contextmanager
def reading(directory: Path) -> Iterator[Reader]:
    reader = Reader(directory)
    try:
        yield reader
    finally:
        reader.stop()
