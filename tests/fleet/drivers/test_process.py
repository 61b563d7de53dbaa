"""Processes that outlive their starter: real ones."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from penstock.fleet.drivers.process import ManagedProcess
from tests.waiting import eventually

FOREVER = "import signal; signal.pause()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); signal.pause()"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "one"


async def start(process: ManagedProcess, code: str) -> bool:
    """`python -m code`, with a module of that content."""
    folder = process.directory.parent / "modules"
    folder.mkdir(exist_ok=True)
    (folder / "work.py").write_text(code)
    return await process.start("work", [str(process.directory)], {**os.environ, "PYTHONPATH": str(folder)})


async def test_process_is_started_once_and_found_by_another_starter(directory: Path) -> None:
    first, second = ManagedProcess(directory), ManagedProcess(directory)
    assert await start(first, FOREVER)
    try:
        assert not await start(second, FOREVER)
        assert second.is_running
        found = eventually(lambda: (second.pid, second.is_running, second.last_words()), lambda seen: seen[0])
        assert found[0] == first.pid
    finally:
        await second.stop(10.0)
    assert not first.is_running
    assert not second.has_begun


async def test_process_that_has_ended_is_not_started_again_and_leaves_its_last_words(directory: Path) -> None:
    process = ManagedProcess(directory)
    await start(process, "print('one'); print('out of memory')")
    eventually(lambda: process.is_running, lambda running: not running)
    assert process.last_words() == "out of memory"
    assert not await start(process, FOREVER)
    await process.stop(0.0)


async def test_killed_process_does_not_run_though_nobody_has_waited_for_it(directory: Path) -> None:
    process, other = ManagedProcess(directory), ManagedProcess(directory)
    await start(process, FOREVER)
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
    await start(process, parent)
    eventually(process.last_words, lambda words: words == "ready")
    assert process.pid is not None
    (child,) = psutil.Process(process.pid).children()
    await process.stop(0.1)
    eventually(lambda: child.is_running() and child.status() != psutil.STATUS_ZOMBIE, lambda alive: not alive)


async def test_one_that_never_was_is_no_error(directory: Path) -> None:
    await ManagedProcess(directory).stop(0.0)
    assert ManagedProcess(directory).pid is None
