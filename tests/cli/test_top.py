"""`penstock top` against a real gateway, as somebody types it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.real_gateway import RealGateway, real_gateway
from tests.server.replica import serving
from tests.waiting import eventually

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "penstock.cli.main", "top"]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealGateway]:
    with serving() as replica, real_gateway(tmp_path_factory.mktemp("top"), replica) as found:
        found.ask("POST", "/v1/completions", {"model": "small", "prompt": "hi", "max_tokens": 3})
        yield found


def top(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *flags], capture_output=True, text=True, timeout=60, env=os.environ | {"COLUMNS": "80"} | environment
    )


def test_once_prints_the_fleet_in_eighty_columns_and_ends(gateway: RealGateway) -> None:
    found = top("--once", "--url", gateway.url)
    assert found.returncode == 0, found.stderr
    assert "1/1 healthy" in found.stdout
    assert "\nQUEUE " in found.stdout
    assert "anonymous" in found.stdout
    assert max(map(len, found.stdout.splitlines())) <= 80
    assert "1/1 healthy" in top("--once", PENSTOCK_URL=gateway.url).stdout


def test_on_a_terminal_it_goes_on_until_q(gateway: RealGateway) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen([*COMMAND, "--url", gateway.url], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    while seen.count(b"\x1b[H") < 3:  # a read fails when the process has ended
        seen += os.read(ours, 4096)
    os.write(ours, b"q")
    assert process.wait(60) == 0
    os.close(ours)
    assert b"\x1b[?1049h" in seen
    assert seen.count(b"healthy") >= 2


def test_what_is_wrong_is_said_in_a_line(gateway: RealGateway, tmp_path: Path) -> None:
    for flags, words in {
        ("--once", "--url", "http://127.0.0.1:9"): "nobody answers",
        ("--once", "--url", "ftp://x"): "is no address",
        ("--url", gateway.url): "this is no terminal",
    }.items():
        found = top(*flags)
        assert found.returncode == 1
        assert words in found.stderr
        assert found.stderr.count("\n") == 1


def test_where_there_are_keys_an_admins_is_needed(tmp_path: Path) -> None:
    with serving() as replica, real_gateway(tmp_path, replica) as gateway:
        key = gateway.command("admins", "add", "root").split()[-1]
        eventually(lambda: gateway.ask("GET", "/admin/v1/queues")[0], lambda status: status != 200)
        refused = top("--once", "--url", gateway.url)
        assert "PENSTOCK_ADMIN_KEY" in refused.stderr
        assert "healthy" in top("--once", "--url", gateway.url, PENSTOCK_ADMIN_KEY=key).stdout
