"""The template process: it has imported torch and penstock once, and is forked for each replica that is started.

    python -m penstock.engine_process.template FD MODULE...

An import of torch takes longer than the rest of a start. A fork shares it, in time and in memory. A fork copies one
thread only, so the template has no other, and has touched neither CUDA nor OpenMP nor an event loop: `check_is_clean`
says so before the first fork, and a template that is not clean ends. It works on Linux only.

FD is a listening Unix socket of packets. A connection is one process that is started, and has three packets:

    client    Spawn     module, arguments, environment, directory; with descriptors: what is passed, and the lifeline
    template  Spawned   the process's id, with a pidfd;  or Refused, and why
    template  Ended     its exit status, as `subprocess` has it: a signal is negative

The new process has a session of its own and runs the module's `main`, as `python -m MODULE ARGUMENTS` would. The
lifeline is the reading end of a pipe: when its other end is closed, and be it by the death of the client, the process
gets a SIGTERM, or the signal that was asked for; a process that is to outlive its client has none. The template's own
death ends none of them. It reaps them all, and ends when its starter does.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import os
import select
import socket
import struct
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import msgspec

from penstock.core.crash_stacks import write_stacks_on_crash
from penstock.link.forking import MAX_PACKET, Ended, Refused, Spawn, Spawned
from penstock.link.parent_death import end_with_named_parent

_MAX_DESCRIPTORS = 16
_REQUEST_S = 5.0  # a client sends its packet at once
# Variables that libraries read when they are loaded: a process that is to have others is not to be forked.
_READ_AT_IMPORT = (
    *("LD_", "MALLOC_", "GLIBC_", "PYTHON", "PENSTOCK_HOME", "XDG_CACHE", "TOKENIZERS_", "RAYON_", "NPY_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "DNNL_", "OPENBLAS_", "ATEN_", "TORCH", "PYTORCH_", "TRITON_"),
)
_READ_LATER = ("TORCHINDUCTOR_CACHE_DIR",)  # torch sets it itself, in a process that uses its compiler
_spawn_decoder = msgspec.json.Decoder(Spawn)


@dataclass(frozen=True)
class Job:
    """The work of a process that was just forked."""

    request: Spawn
    descriptors: list[int]
    lifeline: int | None

    def run(self) -> None:
        request = self.request
        os.setsid()
        lifeline = None if self.lifeline is None else _moved(self.lifeline, above=max(request.places, default=2))
        _put(self.descriptors, request.places)
        os.environ.clear()
        os.environ.update(request.environment)
        os.chdir(request.directory)
        if "numpy" in sys.modules:  # it would draw the same numbers as its siblings; Python's own generator sees a fork
            import_module("numpy.random").seed()
        sys.argv = [request.module, *request.arguments]
        _show([sys.executable, "-m", request.module, *request.arguments])
        if lifeline is not None:
            _end_with(lifeline, request.last_signal)
        module = import_module(request.module)
        (import_module(f"{request.module}.__main__") if hasattr(module, "__path__") else module).main()


class Template:
    def __init__(self, listener: socket.socket, environment: dict[str, str]) -> None:
        """`environment`: with which it was started."""
        self._pid = os.getpid()
        self._listener = listener
        self._read_at_import = _read_at_import(environment)
        self._running: dict[int, tuple[int, socket.socket]] = {}  # by pidfd: the process's id, and whom to tell

    def wait_for_job(self) -> Job:
        """Serve clients. It returns in a forked process, with the work of that."""
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        while True:
            for descriptor, _ in poller.poll():
                if descriptor in self._running:
                    poller.unregister(descriptor)
                    self._reap(descriptor)
                    continue
                connection, _ = self._listener.accept()
                if isinstance(started := self._answer(connection), Job):
                    return started
                if started is not None:
                    poller.register(started, select.POLLIN)

    def _answer(self, connection: socket.socket) -> Job | int | None:
        """A job in the new process, its pidfd in this one; None: there is none."""
        connection.settimeout(_REQUEST_S)
        received: list[int] = []
        try:
            packet, received, _, _ = socket.recv_fds(connection, MAX_PACKET, _MAX_DESCRIPTORS)
            request = _spawn_decoder.decode(packet)
            if reason := self._obstacle(connection, request, received):
                _tell(connection, Refused(reason))
            elif pid := os.fork():
                pidfd = os.pidfd_open(pid)
                self._running[pidfd] = pid, connection
                _tell(connection, Spawned(pid), pidfd)
                return pidfd
            else:
                return self._as_job(request, received, connection)
        except (OSError, msgspec.MsgspecError):
            pass  # whoever asked sees that the connection ends
        finally:
            if os.getpid() == self._pid:
                for descriptor in received:
                    os.close(descriptor)
        connection.close()
        return None

    def _obstacle(self, connection: socket.socket, request: Spawn, received: list[int]) -> str | None:
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():
            return "it serves its own user"
        if len(received) - len(request.places) not in (0, 1):
            return "it wants the descriptors that are named, and a lifeline or none"
        asked = _read_at_import(request.environment)
        other = {name for name, _ in asked.items() ^ self._read_at_import.items()}
        return f"{min(other)} is read when libraries are loaded, and differs from the template's" if other else None

    def _as_job(self, request: Spawn, received: list[int], connection: socket.socket) -> Job:
        """Job in the new process, without what is the template's."""
        self._listener.close()
        connection.close()
        for pidfd, (_, other) in self._running.items():
            os.close(pidfd)
            other.close()
        for descriptor in received:
            os.set_inheritable(descriptor, False)
        passed = received[: len(request.places)]
        return Job(request, passed, received[-1] if len(received) > len(passed) else None)

    def _reap(self, pidfd: int) -> None:
        pid, connection = self._running.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        os.close(pidfd)
        with connection:
            _tell(connection, Ended(os.waitstatus_to_exitcode(status)))


def check_is_clean() -> None:
    """Raises RuntimeError where a fork of this process would not be like a new one."""
    if (num_threads := len(os.listdir("/proc/self/task"))) != 1:
        raise RuntimeError(f"the template has {num_threads} threads, and a fork would copy one of them")
    devices = [link for link in _open_files() if link.startswith("/dev/nvidia")]
    torch = sys.modules.get("torch")
    if devices or (torch is not None and torch.cuda.is_initialized()):
        raise RuntimeError("the template has touched CUDA, which does not survive a fork")


def _open_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the directory's own, which is closed by now
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found


def _read_at_import(environment: dict[str, str]) -> dict[str, str]:
    read = (name for name in environment if name.startswith(_READ_AT_IMPORT) and name not in _READ_LATER)
    return {name: environment[name] for name in read}


def _tell(connection: socket.socket, message: Spawned | Refused | Ended, *descriptors: int) -> None:
    with contextlib.suppress(OSError):  # nobody is there any more; the process sees it by its lifeline
        socket.send_fds(connection, [msgspec.json.encode(message)], descriptors)


def _moved(descriptor: int, *, above: int) -> int:
    """The same under a larger number."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above + 1)
    os.close(descriptor)
    return moved


def _put(descriptors: list[int], places: list[int]) -> None:
    """Each where it was asked for, by way of numbers that are nobody's place."""
    above = max([*descriptors, *places, 2])
    moved = [_moved(descriptor, above=above) for descriptor in descriptors]
    for descriptor, place in zip(moved, places, strict=True):
        os.dup2(descriptor, place, inheritable=place <= 2)
        os.close(descriptor)


def _show(command: list[str]) -> None:
    """The command line, in place of the template's, for `ps`: as much of it as there is room for."""
    start, end = map(int, Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[45:47])  # arg_start, arg_end
    room = end - start
    if room > 0:
        shown = b"\0".join(map(os.fsencode, command))[: room - 1]
        ctypes.memmove(start, shown.ljust(room, b"\0"), room)


def _end_with(lifeline: int, last_signal: int) -> None:
    """A signal for this process when nobody holds the other end. It has no thread for this: the kernel sends it."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, last_signal)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    poller = select.poll()
    poller.register(lifeline, select.POLLHUP)
    if poller.poll(0):  # it was closed before the kernel was asked
        os.kill(os.getpid(), last_signal)


def main() -> None:
    write_stacks_on_crash()
    end_with_named_parent()
    descriptor, *modules = sys.argv[1:]
    environment = dict(os.environ)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's library starts threads when it is loaded; nothing needs them
    for module in modules:
        import_module(module)
    check_is_clean()
    gc.collect()
    gc.freeze()  # a collection in a fork would write to, and so copy, every page
    Template(socket.socket(fileno=int(descriptor)), environment).wait_for_job().run()


if __name__ == "__main__":
    main()
