"""The quickstart, followed word for word: all of its commands on real processes, with ports that the system picks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.hub.home import penstock_home
from tests.waiting import GIVE_UP_S, eventually

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"
SERVERS = ("penstock serve", "penstock engine", "penstock gateway")
ADDRESS = re.compile(r"at http://127\.0\.0\.1:(\d+)")


class Reader:
    """A user with a terminal for each server, in a directory of their own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        programs = directory / "bin"
        programs.mkdir()
        penstock = programs / "penstock"
        penstock.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m penstock.cli.main "$@"\n')
        penstock.chmod(0o755)
        self._environment = os.environ | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PENSTOCK_HOME": str(directory / "home"),
            "PYTHONUNBUFFERED": "1",
        }
        self._ports: dict[str, str] = {}  # as the page has it: as the system picked it
        self._servers: list[subprocess.Popen[bytes]] = []
        (directory / "home").mkdir()
        for name in ("models", "kernels", "formats"):  # they take minutes to make, and are everybody's
            (penstock_home() / name).mkdir(parents=True, exist_ok=True)
            (directory / "home" / name).symlink_to(penstock_home() / name)

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
        log = self.directory / f"server-{len(self._servers)}.log"
        line = "exec " + command.replace(f" --port {port}", "") + " --port 0"
        with log.open("wb") as output:
            self._servers.append(
                subprocess.Popen(
                    ["sh", "-c", line],
                    cwd=self.directory,
                    env=self._environment,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )
        found = eventually(lambda: ADDRESS.search(log.read_text()))
        assert found is not None
        self._ports[port] = found[1]
        eventually(lambda: _is_ready(f"http://127.0.0.1:{found[1]}"))

    def stop(self) -> None:
        for server in self._servers:
            server.send_signal(signal.SIGINT)
        for server in self._servers:
            server.wait()
        self._servers = []

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


def test_the_quickstart_works_as_it_is_written(tmp_path: Path) -> None:
    printed: dict[str, str] = {}
    with reading(tmp_path) as reader:
        for kind, block, stop in re.findall(r"```(sh|yaml)\n(.*?)```|(Stop )", PAGE.read_text(), re.DOTALL):
            if stop:
                reader.stop()
            elif kind == "yaml":
                reader.write(block)
            elif block.startswith(SERVERS):
                reader.start(block.strip())
            else:
                printed |= {line: reader.run(line) for line in block.strip().splitlines()}
    (asked,) = (json.loads(text) for line, text in printed.items() if "capital of France" in line)
    assert "Paris" in asked["choices"][0]["message"]["content"]
    (answered,) = (json.loads(text) for line, text in printed.items() if "Authorization" in line)
    assert answered["usage"]["completion_tokens"] <= 64
    assert "v1=50 v2=50" in " ".join(printed)
    assert "v2" in printed["penstock routes show smollm2"]
    assert "OUTPUT" in printed["penstock usage acme"]
