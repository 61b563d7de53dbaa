"""The test process's side of the fork server that `fake_engine.py` is: an engine is there in milliseconds."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from functools import cache

from tests.engine import fake_engine


class ForkedProcess:
    """The part of `asyncio.subprocess.Process` that an `EngineClient` and its tests use. It is a child of the fork
    server, which tells its exit status through a pipe."""

    def __init__(self, pid: int, exit_pipe: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._exit_pipe = exit_pipe
        self._loop = asyncio.get_running_loop()
        self._has_ended = asyncio.Event()
        self._loop.add_reader(exit_pipe, self._end)

    def _end(self) -> None:
        self._loop.remove_reader(self._exit_pipe)
        self.returncode = int.from_bytes(os.read(self._exit_pipe, 4), "little", signed=True)
        os.close(self._exit_pipe)
        self._has_ended.set()

    async def wait(self) -> int:
        await self._has_ended.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            arguments = [sys.executable, fake_engine.__file__, str(theirs.fileno())]
            self._process = subprocess.Popen(arguments, pass_fds=[theirs.fileno()])
        self._turn = threading.Lock()  # servers of several threads start their engines

    def fork(self, options: bytes, engine_socket: socket.socket) -> ForkedProcess:
        """An engine with these options at the other end of this socket."""
        ours, theirs = os.pipe()
        try:
            with self._turn:
                socket.send_fds(self._control, [options], [engine_socket.fileno(), theirs])
                reply = self._control.recv(4)
        finally:
            os.close(theirs)
        assert len(reply) == 4, "the fork server is gone"
        return ForkedProcess(int.from_bytes(reply, "little"), ours)

    def close(self) -> None:
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)


@cache
def fork_server() -> ForkServer:
    """The one of this process."""
    server = ForkServer()
    atexit.register(server.close)
    return server
