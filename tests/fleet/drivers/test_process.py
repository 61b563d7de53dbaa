"""Processes that outlive their starter: real ones."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from penstock.fleet.drivers.process import ManagedProcess
from tests.waiting import eventually

FOREVER = "import time; time.sleep(3600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(3600)"
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "one"


def command(code: str, directory: Path) -> list[str]:
    return [sys.executable, "-c", code, str(directory)]


async def test_process_is_started_once_and_found_by_another_starter(directory: Path) -> None:
    first, second = ManagedProcess(directory), ManagedProcess(directory)
    assert first.start(command(FOREVER, directory), os.environ)
    try:
        assert not second.start(command(FOREVER, directory), os.environ)
        assert second.is_running
        assert eventually(lambda: second.pid) == first.pid
    finally:
        await second.stop(10.0)
    assert not first.is_running
    assert not second.has_begun


async def test_process_that_has_ended_is_not_started_again_and_leaves_its_last_words(directory: Path) -> None:
    process = ManagedProcess(directory)
    process.start(command("print('one'); print('out of memory')", directory), os.environ)
    eventually(lambda: process.is_running, lambda running: not running)
    assert process.last_words() == "out of memory"
    assert not process.start(command(FOREVER, directory), os.environ)
    await process.stop(0.0)


async def test_killed_process_does_not_run_though_nobody_has_waited_for_it(directory: Path) -> None:
    process, other = ManagedProcess(directory), ManagedProcess(directory)
    process.start(command(FOREVER, directory), os.environ)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    eventually(lambda: other.is_running, lambda running: not running)
    await other.stop(0.0)


async def test_process_that_ignores_its_signals_is_killed_with_its_children(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.fleet.drivers.process._KILL_S", 0.1)
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {FOREVER!r}]); {STUBBORN}"
    process = ManagedProcess(directory)
    process.start(command(parent, directory), os.environ)
    eventually(process.last_words, lambda words: words == "ready")
    assert process.pid is not None
    (child,) = psutil.Process(process.pid).children()
    await process.stop(0.1)
    eventually(lambda: child.is_running() and child.status() != psutil.STATUS_ZOMBIE, lambda alive: not alive)


async def test_one_that_never_was_is_no_error(directory: Path) -> None:
    await ManagedProcess(directory).stop(0.0)
    assert ManagedProcess(directory).pid is None
