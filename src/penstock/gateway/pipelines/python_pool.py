"""Processes that run the function of one Python step, and the calls that wait for one of them.

The queue is bounded. A call has until its deadline: a process that still works on it then is killed, one that dies is
started again, and the call is told so. What nobody waits for any more may go on to its deadline: a client that leaves
costs no new process. Belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

from penstock.core.errors import EngineUnavailable, Overloaded, PenstockError, StepFailed
from penstock.gateway.pipelines.graph import PythonStep
from penstock.gateway.pipelines.python_process import MAX_FRAME_BYTES
from penstock.http import clock as clocks
from penstock.http.clock import Timer, TimerClock
from penstock.observe.background import outliving

START_S = 30.0  # in which the operator's file is to be loaded
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 30.0  # before a process is started again that did not start
_RETRY_AFTER_S = 1.0
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")

log = logging.getLogger("penstock.gateway.pipelines")

Done = Callable[[Any, PenstockError | None], None]


class ProcessLike(Protocol):
    """A process that was started."""

    pid: int

    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...


class Started(NamedTuple):
    process: ProcessLike
    link: socket.socket  # ours


class PythonJob:
    """One call. Whoever asked for it may give it up."""

    __slots__ = ("_done", "arguments", "is_late", "num_bytes", "process", "timer")

    def __init__(self, arguments: bytes, done: Done) -> None:
        self.arguments = arguments
        self._done: Done | None = done
        self.timer: Timer | None = None
        self.process: ProcessLike | None = None  # that works on it
        self.is_late = False  # its deadline is over
        self.num_bytes = 0  # of its result

    @property
    def is_wanted(self) -> bool:
        return self._done is not None

    def cancel(self) -> None:
        self._done = None

    def end(self, value: Any, error: PenstockError | None = None) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        done, self._done = self._done, None
        if done is not None:
            done(value, error)


class PythonPool:
    def __init__(
        self,
        step: PythonStep,
        clock: TimerClock,
        start: Callable[[PythonStep], Awaitable[Started]] | None = None,
    ) -> None:
        """`start`: of a process; None: a real one."""
        self.step = step
        self.num_restarts = 0
        self._clock = clock
        self._start = start or start_process
        self._waiting: deque[PythonJob] = deque()
        self._running: set[PythonJob] = set()
        self._news = asyncio.Event()
        self._is_closed = self._is_retired = False
        self._cannot_start = False  # the last process could not
        self._processes: set[ProcessLike] = set()
        loop = asyncio.get_running_loop()
        self._tasks = {loop.create_task(self._work(number)) for number in range(step.limits.processes)}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def call(self, arguments: Mapping[str, Any], timeout_s: float, done: Done) -> PythonJob:
        """`done` is told the result, or what went wrong; not from inside here, and not if the job is cancelled. Raises
        Overloaded where too many wait, and StepFailed where no process starts."""
        if self._is_closed:
            raise EngineUnavailable("the gateway is stopping", retry_after_s=_RETRY_AFTER_S)
        if self._cannot_start:
            raise _not_loaded()
        if len(self._waiting) >= self.step.limits.queue + self._num_free:
            raise Overloaded(
                f"{len(self._waiting)} calls wait for its processes already",
                reason="python_queue",
                retry_after_s=_RETRY_AFTER_S,
            )
        data = msgspec.json.encode({"arguments": arguments})
        if len(data) > MAX_FRAME_BYTES:
            raise StepFailed(f"its inputs are larger than {MAX_FRAME_BYTES >> 20} MiB", reason="too_large")
        job = PythonJob(data, done)
        job.timer = self._clock.call_later(timeout_s, self._late, job)
        self._waiting.append(job)
        self._news.set()
        return job

    @property
    def _num_free(self) -> int:
        return self.step.limits.processes - len(self._running)

    def retire(self) -> None:
        """Takes no more calls, and ends its processes when those that are here are over."""
        self._is_retired = True
        if not self._waiting and not self._running:
            self.close()

    def close(self) -> None:
        """Processes are killed at once; calls are told."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        for process in self._processes:
            kill(process)
        for job in (*self._waiting, *self._running):
            job.end(None, EngineUnavailable("the gateway is stopping", retry_after_s=_RETRY_AFTER_S))
        self._waiting.clear()

    # -- inside

    def _late(self, job: PythonJob) -> None:
        job.is_late = True
        if job in self._waiting:
            self._waiting.remove(job)
            job.end(None, StepFailed("no process was free in time", reason="python_queue"))
        elif job.process is not None:
            kill(job.process)

    async def _work(self, number: int) -> None:
        """The lives of one process after another."""
        pause_s = _FIRST_PAUSE_S
        while not self._is_closed:
            with outliving("Python step"):
                is_started = await self._live(number)
                if is_started:
                    pause_s = _FIRST_PAUSE_S
                    self.num_restarts += 1
                    continue
            await clocks.sleep(self._clock, pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    async def _live(self, number: int) -> bool:
        """One life. Returns whether the process did start."""
        try:
            started = await self._start(self.step)
        except OSError as error:
            self._did_not_start({"error": f"no process can be started: {error.strerror}"})
            return False
        process = started.process
        dying = asyncio.ensure_future(process.wait())
        dying.add_done_callback(lambda _: self._news.set())
        writer: asyncio.StreamWriter | None = None
        self._processes.add(process)
        try:
            reader, writer = await asyncio.open_connection(sock=started.link)
            try:
                async with clocks.timeout(self._clock, START_S):
                    told, _ = await _receive(reader)
            except TimeoutError:
                told = {"error": f"it was not loaded within {START_S:g} s"}
            if not told.get("ready"):
                self._did_not_start(told)
                return False
            self._cannot_start = False
            while await self._next(process, reader, writer):
                pass
            return True
        finally:
            kill(process)
            if writer is not None:
                writer.close()
            else:
                started.link.close()
            self._processes.discard(process)
            await asyncio.shield(dying)

    def _did_not_start(self, told: dict[str, Any]) -> None:
        name, entry = self.step.name, self.step.entry
        problem = str(told.get("error") or "its process died before it was loaded")
        log.error("step '%s': %s cannot be loaded: %s", name, entry.file, problem)
        self._cannot_start = True
        waiting, self._waiting = self._waiting, deque()
        for job in waiting:
            job.end(None, _not_loaded())

    async def _next(self, process: ProcessLike, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One call. Returns whether the process can take another."""
        job = await self._take(process)
        if job is None:
            return False
        job.process = process
        self._running.add(job)
        try:
            writer.write(len(job.arguments).to_bytes(4, "big") + job.arguments)
            told, job.num_bytes = await _receive(reader)
        finally:
            self._running.discard(job)
            job.process = None
        if "value" in told:
            job.end(told["value"])
        elif "error" in told:
            job.end(None, StepFailed(str(told["error"]), reason=str(told.get("reason", "raised"))))
        elif job.is_late:
            job.end(None, StepFailed("it took too long, and its process was killed", reason="overrun"))
        else:
            kill(process)
            code = await process.wait()
            cause = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            job.end(None, StepFailed(f"its process ended {cause}", reason="crashed"))
        if self._is_retired and not self._waiting and not self._running:
            self.close()
        return bool(told) and told.get("reason") != "memory"

    async def _take(self, process: ProcessLike) -> PythonJob | None:
        """The next call that somebody still wants; None: the process died while nobody did."""
        while process.returncode is None:
            while self._waiting:
                job = self._waiting.popleft()
                if job.is_wanted:
                    return job
                job.end(None)
            self._news.clear()
            await self._news.wait()
        return None


def _not_loaded() -> StepFailed:
    """Why is in the gateway's log, and not for clients."""
    return StepFailed("its file cannot be loaded", reason="start")


async def start_process(step: PythonStep) -> Started:
    ours, theirs = socket.socketpair()
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # no file of the working directory takes a name of the standard library
            "-m",
            "penstock.gateway.pipelines.python_process",
            str(theirs.fileno()),
            str(step.entry.file),
            step.entry.function,
            str(step.limits.memory_mib),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=environment_of(step),
            start_new_session=True,  # what it starts itself is killed with it
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    ours.setblocking(False)
    return Started(process, ours)


def environment_of(step: PythonStep) -> dict[str, str]:
    """No key of the gateway's is in it, unless the step names it."""
    names = (*_PASSED_ON, *step.limits.env)
    found = {name: os.environ[name] for name in names if name in os.environ}
    return {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} | found


def kill(process: ProcessLike) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


async def _receive(reader: asyncio.StreamReader) -> tuple[dict[str, Any], int]:
    """A frame, and its size. Empty: the process is gone, or says what makes no sense."""
    try:
        count = int.from_bytes(await reader.readexactly(4), "big")
        if count > MAX_FRAME_BYTES:
            return {}, 0
        data = await reader.readexactly(count)
    except (asyncio.IncompleteReadError, ConnectionError):
        return {}, 0
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return {"error": f"its result cannot be read: {error}", "reason": "wrong_result"}, count
    return (found if isinstance(found, dict) else {}), count
