"""The template process, real processes on both sides; what is forked is a small program of the tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.engine_process.spawn import ChildProcess, ForkedProcess, TemplateProcess, spawn
from penstock.link import forking
from penstock.link.forking import Spawn
from tests.waiting import eventually, eventually_async

PROGRAM = "tests.engine_process.forked"
pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="there are templates on Linux only"), pytest.mark.slow]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TemplateProcess]:
    with TemplateProcess.start(["fractions"], tmp_path_factory.mktemp("template")) as started:
        assert started is not None
        yield started


async def started(what: str) -> tuple[ChildProcess, dict[str, Any]]:
    """A process of the program, and what it found."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = await spawn(PROGRAM, [str(theirs.fileno()), what], pass_fds=[theirs.fileno()])
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    with contextlib.closing(writer):
        return process, json.loads(await reader.readline())


async def test_forked_process_is_as_one_that_is_executed(
    template: TemplateProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_VARIABLE", "set after the template was started")
    monkeypatch.chdir(tmp_path)
    forked, found = await started("3")
    monkeypatch.setenv("PENSTOCK_TEMPLATE", "off")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    executed, wanted = await started("3")
    assert isinstance(forked, ForkedProcess)
    assert not isinstance(executed, ForkedProcess)
    assert (await forked.wait(), await executed.wait()) == (3, 3)
    for one in (found, wanted):
        descriptor = int(one["argv"][0])
        assert descriptor in one["descriptors"]
    assert found["variable"] == wanted["variable"] == "set after the template was started"
    assert found["directory"] == wanted["directory"] == str(tmp_path)
    assert found["argv"][1:] == ["3"]
    assert (found["pid"], found["session"]) == (forked.pid, forked.pid)
    assert found["threads"] == 1


async def test_forked_process_has_the_modules_and_no_descriptor_of_the_template(template: TemplateProcess) -> None:
    waiting, _ = await started("wait")
    process, found = await started("0")
    assert found["has_fractions"]
    assert len(found["descriptors"]) == 6  # standard streams, what was passed, the lifeline, the listing itself
    assert await process.wait() == 0
    waiting.kill()
    await waiting.wait()


async def test_end_of_a_forked_process_is_told_and_leaves_no_zombie(template: TemplateProcess) -> None:
    process, _ = await started("wait")
    assert process.returncode is None
    process.kill()
    assert await process.wait() == process.returncode == -signal.SIGKILL
    assert not psutil.pid_exists(process.pid)
    with pytest.raises(ProcessLookupError):
        process.terminate()


async def test_process_is_given_an_environment_and_a_place_for_its_output(
    template: TemplateProcess, tmp_path: Path
) -> None:
    with (tmp_path / "log").open("wb") as log:
        environment = {**os.environ, "PENSTOCK_TEST_VARIABLE": "its own"}
        output = log.fileno()
        process = await spawn(PROGRAM, ["1", "0"], env=environment, stdout=output, stderr=output)
    assert isinstance(process, ForkedProcess)
    assert await process.wait() == 0
    assert json.loads((tmp_path / "log").read_text())["variable"] == "its own"


def started_for_threads(place: int) -> forking.ForkedProcess:
    """A process of the program, which has written to the descriptor of this number."""
    ours, theirs = socket.socketpair()
    request = Spawn(PROGRAM, [str(place), "wait"], dict(os.environ), os.getcwd(), [0, 1, 2, place], signal.SIGKILL)
    path = os.environ["PENSTOCK_TEMPLATE"]
    process = forking.ForkedProcess(path, request, [subprocess.DEVNULL, 1, 2, theirs.fileno()])
    theirs.close()
    with ours, ours.makefile() as told:
        assert json.loads(told.readline())["pid"] == process.pid
    return process


def test_process_for_threads_ends_with_its_object_whatever_numbers_its_descriptors_have(
    template: TemplateProcess,
) -> None:
    for place in range(3, 14):  # the lifeline's own is among them
        process = started_for_threads(place)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM  # and nothing has ended it before
        process = started_for_threads(place)
        forked = psutil.Process(process.pid)
        del process
        eventually(forked.is_running, lambda runs: not runs)


def test_end_of_a_process_for_threads_is_told_to_all_who_ask(template: TemplateProcess) -> None:
    request = Spawn(PROGRAM, ["1", "wait"], dict(os.environ), os.getcwd(), [0, 1, 2])
    process = forking.ForkedProcess(os.environ["PENSTOCK_TEMPLATE"], request, [subprocess.DEVNULL] * 3)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.0)
    process.kill()
    assert [process.wait(), process.wait(timeout=0.0), process.poll()] == [-signal.SIGKILL] * 3
    process.kill()  # once more, which nobody hears


async def test_many_processes_at_a_time_each_have_their_own_end(template: TemplateProcess) -> None:
    all_started = await asyncio.gather(*(started(str(status)) for status in range(8)))
    assert [await process.wait() for process, _ in all_started] == list(range(8))


async def test_command_line_of_a_forked_process_is_its_own(template: TemplateProcess) -> None:
    process, _ = await started("wait")
    assert psutil.Process(process.pid).cmdline()[1:3] == ["-m", PROGRAM]
    process.terminate()
    assert await process.wait() == -signal.SIGTERM


async def test_process_outlives_its_template_and_the_next_one_is_executed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    with TemplateProcess.start([], tmp_path) as template:
        assert template is not None
        process, _ = await started("wait")
        os.kill(template.pid, signal.SIGKILL)
        await eventually_async(lambda: psutil.Process(template.pid).status(), lambda now: now == psutil.STATUS_ZOMBIE)
        other, _ = await started("5")
        assert await other.wait() == 5
        assert "no process can be forked from the template" in caplog.text
        assert process.returncode is None
        process.kill()
        assert await process.wait() == 255  # nobody can know


async def test_variable_that_libraries_read_as_they_load_is_not_forked_away(
    template: TemplateProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*sys.path, "elsewhere"]))
    process, _ = await started("0")
    assert not isinstance(process, ForkedProcess)
    assert await process.wait() == 0
    assert "PYTHONPATH is read when libraries are loaded" in caplog.text


async def test_variable_that_torch_sets_as_it_runs_does_not_forbid_a_fork(
    template: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "somewhere")
    process, _ = await started("0")
    assert isinstance(process, ForkedProcess)
    assert await process.wait() == 0


async def test_template_with_a_second_thread_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    (tmp_path / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*sys.path, str(tmp_path)]))
    with TemplateProcess.start(["threaded"], tmp_path):
        process, _ = await started("0")
        assert not isinstance(process, ForkedProcess)
        assert await process.wait() == 0


def test_process_and_template_end_with_their_starter_however_it_ends() -> None:
    starter = subprocess.Popen(
        [sys.executable, "-m", "tests.engine_process.starter"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert starter.stdout is not None
    lines = [json.loads(starter.stdout.readline()) for _ in range(3)]  # of the starter, and of each that it started
    (told,) = (line for line in lines if "template" in line)
    starter.kill()
    starter.wait()
    starter.stdout.close()
    for name in ("template", "process"):
        eventually(lambda name=name: psutil.pid_exists(told[name]), lambda exists: not exists)
    os.kill(told["outliving"], signal.SIGKILL)  # which is an error for one that has ended
