"""Processes of Python steps: real ones, which are killed, crash, run out of memory and of time."""

from __future__ import annotations

import asyncio
import os
import signal
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import EngineUnavailable, Overloaded, PenstockError, StepFailed
from penstock.gateway.pipelines.graph import EntryPoint, Policy, PythonLimits, PythonStep
from penstock.gateway.pipelines.python_pool import PythonPool
from penstock.gateway.pipelines.types import ANY_JSON
from tests.clocks import SlowClock
from tests.waiting import eventually_async

pytestmark = pytest.mark.slow

STEPS = """
    import os, subprocess, sys, time

    def double(number):
        print("this goes to the log")
        return 2 * number

    def pid():
        return os.getpid()

    def hang(mark):
        open(mark, "w").write(str(subprocess.Popen(["sleep", "600"]).pid))
        while True:
            pass

    def fill():
        return len([bytearray(1 << 20) for _ in range(4096)])

    def die():
        os.kill(os.getpid(), 9)

    def leave():
        os._exit(3)

    def raise_it():
        raise ValueError("not so")

    def odd():
        return object()

    def secret():
        return [os.environ.get("SECRET_KEY"), os.environ.get("WANTED")]
"""


def step(directory: Path, function: str, source: str = STEPS, **limits: Any) -> PythonStep:
    file = directory / "steps.py"
    if not file.exists():
        file.write_text(textwrap.dedent(source))
    entry = EntryPoint(file, function)
    return PythonStep("it", Policy(timeout_s=5.0), ANY_JSON, "steps.it", entry, {}, PythonLimits(**limits))


@asynccontextmanager
async def opened(
    directory: Path, function: str, clock: SlowClock | None = None, **limits: Any
) -> AsyncIterator[PythonPool]:
    pool = PythonPool(step(directory, function, **limits), clock or SlowClock())
    try:
        yield pool
    finally:
        pool.close()


def call(pool: PythonPool, timeout_s: float = 500.0, **arguments: Any) -> asyncio.Future[Any]:
    told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def done(value: Any, error: PenstockError | None) -> None:
        told.set_result(value) if error is None else told.set_exception(error)

    pool.call(arguments, timeout_s, done)
    return told


async def reason_of(told: asyncio.Future[Any]) -> str | None:
    with pytest.raises(PenstockError) as found:
        await told
    return found.value.reason


async def test_calls_are_answered_one_after_another_by_the_same_process(tmp_path: Path) -> None:
    async with opened(tmp_path, "pid") as pool:
        assert len({await call(pool) for _ in range(3)}) == 1
        assert pool.num_restarts == 0


@pytest.mark.parametrize(
    ("function", "reason"),
    [("die", "crashed"), ("leave", "crashed"), ("fill", "memory"), ("raise_it", "raised"), ("odd", "wrong_result")],
)
async def test_what_goes_wrong_is_told_and_the_next_call_is_answered(
    tmp_path: Path, function: str, reason: str
) -> None:
    async with opened(tmp_path, function, memory_mib=64) as pool:
        assert [await reason_of(call(pool)) for _ in range(2)] == [reason, reason]


async def test_a_process_that_overruns_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    mark, clock = tmp_path / "mark", SlowClock()
    async with opened(tmp_path, "hang", clock) as pool:
        told = call(pool, timeout_s=50.0, mark=str(mark))
        await eventually_async(lambda: mark.exists() and mark.read_text())
        clock.advance(50.0)
        assert await reason_of(told) == "overrun"
        child = int(mark.read_text())
        await eventually_async(lambda: _is_gone(child))
        await eventually_async(lambda: pool.num_restarts == 1)


async def test_a_process_that_is_killed_is_started_again(tmp_path: Path) -> None:
    async with opened(tmp_path, "pid") as pool:
        first = await call(pool)
        os.kill(first, signal.SIGKILL)
        await eventually_async(lambda: pool.num_restarts == 1)
        assert await call(pool) != first


async def test_the_queue_is_bounded(tmp_path: Path) -> None:
    async with opened(tmp_path, "hang", queue=1) as pool:
        told = [call(pool, mark=str(tmp_path / "mark"))]
        await eventually_async(lambda: pool.num_running == 1)
        told.append(call(pool, mark=str(tmp_path / "mark")))
        with pytest.raises(Overloaded) as refused:
            call(pool, mark="")
        assert refused.value.retry_after_s
        pool.close()
        for one in told:
            with pytest.raises(EngineUnavailable):
                await one


async def test_why_a_file_cannot_be_loaded_is_in_the_log_and_not_for_clients(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "steps.py").write_text("import nothing_like_this\ndef double(number): ...")
    clock = SlowClock()
    async with opened(tmp_path, "double", clock) as pool:
        with pytest.raises(StepFailed, match=r"^its file cannot be loaded$"):
            await call(pool, number=1)
        assert "nothing_like_this" in caplog.text
        with pytest.raises(StepFailed, match="cannot be loaded"):  # at once: it waits for nobody
            call(pool, number=1)
        (tmp_path / "steps.py").write_text("def double(number): return number")

        def passes() -> bool:
            clock.advance(1.0)
            return not pool._cannot_start

        await eventually_async(passes)
        assert await call(pool, number=1) == 1


async def test_only_variables_that_are_named_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "psk_secret")
    monkeypatch.setenv("WANTED", "yes")
    async with opened(tmp_path, "secret", env=("WANTED",)) as pool:
        assert await call(pool) == [None, "yes"]


async def test_processes_end_with_the_pool(tmp_path: Path) -> None:
    async with opened(tmp_path, "pid", processes=2) as pool:
        process_id = await call(pool)
    await eventually_async(lambda: _is_gone(process_id))


async def test_a_retired_pool_ends_when_its_calls_are_over(tmp_path: Path) -> None:
    async with opened(tmp_path, "double") as pool:
        told = call(pool, number=4)
        pool.retire()
        assert await told == 8
        await eventually_async(lambda: all(task.done() for task in pool._tasks))


def _is_gone(process_id: int) -> bool:
    try:
        return (Path("/proc") / str(process_id) / "stat").read_text().split()[2] == "Z"
    except FileNotFoundError:
        return True
