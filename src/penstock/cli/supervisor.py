"""Several gateway processes on one host: the supervisor holds the listening sockets and starts workers that accept.

The supervisor carries no request, so the end of one worker costs what was open there and refuses nobody. A worker that
dies is started again; one that hangs, and so sends no heartbeats, is killed first. On SIGUSR2 each worker is replaced
by a new process, which reads code and configuration again and accepts before the old one stops to. SIGHUP goes on to
all workers; SIGTERM and SIGINT drain and end them.

Workers outlive a supervisor that is killed. The next one gets the listening sockets from them, and replaces them.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

from penstock.cli import sd_notify
from penstock.cli.gateway_worker import (
    HAND_OVER_S,
    PATIENT_S,
    Address,
    Started,
    WorkerSpec,
    ask,
    take_listeners,
    worker_socket,
    worker_sockets,
)
from penstock.cli.heartbeat import heartbeat_pipe, is_silent
from penstock.cli.start_report import read_line
from penstock.core.errors import ConfigError, EngineFailed, PenstockError
from penstock.core.private_files import make_private
from penstock.engine.client import as_error
from penstock.engine.messages import Failed
from penstock.hub.home import penstock_home
from penstock.link.parent_death import named_parent

log = logging.getLogger("penstock.gateway")

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0
_START_S = 120.0
_STOP_S = 40.0  # a gateway drains for 30
_DUMP_S = 5.0  # for a worker that hangs to write its stacks and end; one that is stopped cannot
_LOCK = "supervisor.pid"
_start_decoder = msgspec.json.Decoder(Started | Failed)


def run_directory(config: Path) -> Path:
    """The place of the processes of a gateway, by its configuration file: two supervisors never share one."""
    return penstock_home() / "run" / sha256(str(config.resolve()).encode()).hexdigest()[:12]


@contextlib.contextmanager
def sole_supervisor(directory: Path) -> Iterator[Path]:
    """The directory, as long as it is this process's: the kernel frees its lock whatever ends the process. Raises
    ConfigError while it is another's."""
    make_private(directory)
    with (directory / _LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"this gateway runs already, under process {_process_id(directory)}") from None
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # until it is listened to: others know the process from here on
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield directory


def restart_workers(directory: Path) -> int:
    """Tells the supervisor to replace its workers; returns its process id. Raises ConfigError if there is none."""
    try:
        with sole_supervisor(directory):
            pass
    except ConfigError:
        process_id = _process_id(directory)
        os.kill(process_id, signal.SIGUSR2)
        return process_id
    raise ConfigError("no gateway with --processes runs for this file")


def _process_id(directory: Path) -> int:
    text = (directory / _LOCK).read_text()
    if not text:
        raise ConfigError("this gateway is just being started or told to restart")
    return int(text)


@dataclass
class Listeners:
    addresses: list[Address]
    sockets: list[socket.socket]
    orphans: list[Path]  # the Unix sockets of workers that have lost their supervisor

    @classmethod
    def take_over(cls, addresses: list[Address], directory: Path) -> Listeners:
        """The listening sockets that orphans have for the same addresses, and new ones for the others."""
        make_private(directory)
        orphans, offered = [], []
        for path in worker_sockets(directory):
            try:
                offered += take_listeners(path)
            except TimeoutError:
                log.error("the worker at %s does not answer", path)
            except OSError:  # nobody is there
                path.unlink(missing_ok=True)
            else:
                orphans.append(path)
        with contextlib.ExitStack() as stack:
            found = {address: stack.enter_context(sock) for address, sock in offered}
            return cls(addresses, [found[one].dup() if one in found else one.bind() for one in addresses], orphans)

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()


@dataclass(eq=False)
class _Worker:
    slot: int
    process: asyncio.subprocess.Process
    path: Path
    heartbeats: FileIO
    started: Started
    began_s: float


class Supervisor:
    def __init__(
        self,
        command: Sequence[str],
        listeners: Listeners,
        directory: Path,
        num_workers: int,
        *,
        worker_timeout_s: float | None,
        outlived_by_workers: bool = True,
    ) -> None:
        """`command`: the words of `penstock gateway …` for a worker; `worker_timeout_s`: one that sends no heartbeat
        for so long hangs."""
        self._command = command
        self._listeners = listeners
        self._directory = directory
        self._num_workers = num_workers
        self._worker_timeout_s = worker_timeout_s
        self._outlived = outlived_by_workers
        self._serving: dict[int, _Worker] = {}
        self._processes: set[asyncio.subprocess.Process] = set()  # all that have not ended
        self._slots = [asyncio.Lock() for _ in range(num_workers)]  # held by who puts a worker into one
        self._waits_s = [0.0] * num_workers  # before the next start of the same slot
        self._tasks: set[asyncio.Task[None]] = set()
        self._rolling: asyncio.Task[None] | None = None

    async def run(self, on_open: Callable[[Started], None]) -> None:
        """Runs the workers until a signal ends it. Raises why the first worker cannot be started."""
        told, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, told.set)
        loop.add_signal_handler(signal.SIGHUP, self._pass_hangup)
        loop.add_signal_handler(signal.SIGUSR2, self._begin_rolling)
        beginning = self._task(self._begin(on_open))
        ending = asyncio.create_task(told.wait())
        try:
            await asyncio.wait((beginning, ending), return_when=asyncio.FIRST_COMPLETED)
            if beginning.done():
                beginning.result()
                await ending
        finally:
            ending.cancel()
            await self._end(is_failed=not told.is_set())

    async def num_ready(self) -> int:
        """The replicas that every worker finds ready."""
        asked = [asyncio.to_thread(ask, worker.path, "ready") for worker in self._serving.values()]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return min((int(one) for one in answers if isinstance(one, bytes)), default=0)

    # -- the beginning and the end

    async def _begin(self, on_open: Callable[[Started], None]) -> None:
        """The first alone: it makes what is shared, and tells what is wrong with the configuration."""
        self._put(await self._start(0, is_replacement=bool(self._listeners.orphans)))
        on_open(self._serving[0].started)
        sd_notify.notify(sd_notify.READY)
        await asyncio.gather(*[self._fill(slot) for slot in range(1, self._num_workers)])
        await self._retire_orphans()

    async def _retire_orphans(self) -> None:
        orphans, self._listeners.orphans = self._listeners.orphans, []
        for path in orphans:
            with contextlib.suppress(OSError):  # it has ended
                await asyncio.to_thread(ask, path, "drain", PATIENT_S)
        if orphans:
            log.info("%d workers of an earlier supervisor were replaced", len(orphans))

    async def _end(self, *, is_failed: bool) -> None:
        """Ends the workers. After a failure, those that this supervisor has only found go on as they did."""
        sd_notify.notify(sd_notify.STOPPING)
        self._listeners.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        if not is_failed:
            await self._retire_orphans()
        if self._processes:
            _, late = await asyncio.wait(
                [asyncio.create_task(process.wait()) for process in self._processes], timeout=_STOP_S
            )
            if late:
                log.error("%d workers did not end in %.0f s, and are killed", len(late), _STOP_S)
            for process in self._processes:
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- one worker

    async def _start(self, slot: int, *, is_replacement: bool) -> _Worker:
        """A worker that accepts. Raises why there is none."""
        began_s = asyncio.get_running_loop().time()
        (ours, theirs), (heartbeats, sent) = socket.socketpair(), heartbeat_pipe()
        try:
            with theirs, sent:
                process = await self._spawn(slot, is_replacement, theirs.fileno(), sent.fileno())
        except OSError as error:
            ours.close()
            heartbeats.close()
            raise EngineFailed(f"no process can be started: {error.strerror}") from None
        self._processes.add(process)
        try:
            report = await asyncio.wait_for(read_line(ours), _START_S)
        except TimeoutError:
            process.kill()
            report = b""
        told = _start_decoder.decode(report) if report else None
        if isinstance(told, Started):
            path = worker_socket(self._directory, slot, process.pid)
            return _Worker(slot, process, path, heartbeats, told, began_s)
        heartbeats.close()
        code = await process.wait()
        self._processes.discard(process)
        if isinstance(told, Failed):
            raise as_error(told.code, told.message)
        raise EngineFailed(f"a worker of the gateway {_how_ended(code)} before it was ready")

    async def _spawn(self, slot: int, is_replacement: bool, report: int, heartbeats: int) -> asyncio.subprocess.Process:
        descriptors = [sock.fileno() for sock in self._listeners.sockets]
        addresses = self._listeners.addresses
        spec = WorkerSpec(slot, str(self._directory), addresses, descriptors, is_replacement, report, heartbeats)
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "penstock.cli.main",
            *self._command,
            "--worker",
            msgspec.json.encode(spec).decode(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is for the supervisor
            pass_fds=[*descriptors, report, heartbeats],
            env={name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}
            | ({} if self._outlived else named_parent()),
        )

    def _put(self, worker: _Worker) -> None:
        """Gives a worker its slot; one that has it drains."""
        old = self._serving.get(worker.slot)
        self._serving[worker.slot] = worker
        log.info("worker %d is process %d", worker.slot, worker.process.pid)
        self._task(self._watch(worker))
        self._task(self._kill_if_silent(worker))
        if old is not None and old.process.returncode is None:
            self._task(self._retire(old))

    async def _watch(self, worker: _Worker) -> None:
        code = await worker.process.wait()
        self._processes.discard(worker.process)
        worker.path.unlink(missing_ok=True)
        if self._serving[worker.slot] is worker:
            if asyncio.get_running_loop().time() - worker.began_s > _LONGEST_WAIT_S:
                self._waits_s[worker.slot] = 0.0
            self._back_off(worker.slot, f"it {_how_ended(code)}")
            await self._fill(worker.slot, instead_of=worker)

    async def _kill_if_silent(self, worker: _Worker) -> None:
        with worker.heartbeats:
            if self._worker_timeout_s is None or not await is_silent(worker.heartbeats, self._worker_timeout_s):
                return
        log.error(
            "worker %d hangs: process %d has sent no heartbeat for %.0f s, and is killed",
            worker.slot,
            worker.process.pid,
            self._worker_timeout_s,
        )
        with contextlib.suppress(OSError):  # a core would hold clients' prompts
            resource.prlimit(worker.process.pid, resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(ProcessLookupError):
            worker.process.send_signal(signal.SIGABRT)
        try:
            await asyncio.wait_for(worker.process.wait(), _DUMP_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                worker.process.kill()

    async def _fill(self, slot: int, *, instead_of: _Worker | None = None) -> None:
        """Starts a worker, and tries again until there is one."""
        while True:
            await asyncio.sleep(self._waits_s[slot])
            async with self._slots[slot]:
                if self._serving.get(slot) is not instead_of:
                    return  # a rolling restart came first
                try:
                    self._put(await self._start(slot, is_replacement=True))
                    return
                except PenstockError as error:
                    self._back_off(slot, error.message)

    def _back_off(self, slot: int, why: str) -> None:
        self._waits_s[slot] = wait_s = min(max(2 * self._waits_s[slot], _FIRST_WAIT_S), _LONGEST_WAIT_S)
        log.warning("worker %d is started again in %.1f s: %s", slot, wait_s, why)

    async def _retire(self, worker: _Worker) -> None:
        try:
            await asyncio.to_thread(ask, worker.path, "drain", PATIENT_S)
        except OSError as error:
            log.error("worker %d does not answer, and is stopped: %s", worker.slot, error)
            with contextlib.suppress(ProcessLookupError):
                worker.process.terminate()
        try:
            await asyncio.wait_for(worker.process.wait(), HAND_OVER_S + _STOP_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                worker.process.kill()

    # -- signals

    def _pass_hangup(self) -> None:
        for worker in self._serving.values():
            with contextlib.suppress(ProcessLookupError):
                worker.process.send_signal(signal.SIGHUP)

    def _begin_rolling(self) -> None:
        if self._rolling is None or self._rolling.done():
            self._rolling = self._task(self._roll())

    async def _roll(self) -> None:
        """One slot after another; a configuration that cannot be used leaves the rest as it is."""
        log.info("a rolling restart of %d workers begins", self._num_workers)
        for slot in range(self._num_workers):
            async with self._slots[slot]:
                try:
                    self._put(await self._start(slot, is_replacement=True))
                except PenstockError as error:
                    log.error("the rolling restart ends at worker %d, which stays as it is: %s", slot, error.message)
                    return
        log.info("all %d workers were replaced", self._num_workers)


def _how_ended(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"
