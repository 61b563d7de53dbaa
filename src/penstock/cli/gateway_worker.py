"""One of several gateway processes of a host, which accept from the same listening sockets.

A supervisor starts a worker with the sockets (`WorkerSpec`); from then on the worker needs nobody. Should the
supervisor be killed, the worker serves on. At a Unix socket of its own it answers one word for each connection:

listeners   the addresses and the sockets themselves (SCM_RIGHTS), for the supervisor that comes after
metrics     the worker's label and its metrics, for the sibling that is scraped
ready       how many replicas the worker finds ready
reload      the worker reads its configuration again
drain       the worker accepts no more, finishes what it has begun, and ends: another one has its place
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from penstock.cli.heartbeat import heartbeats_sent
from penstock.cli.listening import listening_socket
from penstock.core.errors import ConfigError, PenstockError
from penstock.engine.messages import Failed
from penstock.gateway.settings.gateway import GatewaySettings
from penstock.observe.merge import merged
from penstock.observe.redaction import redact
from penstock.observe.registry import Registry

_ASK_S = 2.0  # for views: a worker that answers no sooner is left out
PATIENT_S = 30.0  # a worker that answers no sooner hangs: to stop it otherwise would break connections
_MAX_WORD_BYTES = 64
_MAX_LISTENERS = 2
_IDLE_GRACE_S = 5.0
_WARM_UP_S = 3.0
_LOOK_S = 0.02
HAND_OVER_S = 300.0  # for the streams of a worker that was replaced; nobody waits for it


class Stoppable(Protocol):
    """A server, to be told that another process has its place."""

    def stop(self, grace_s: float, *, idle_grace_s: float) -> Coroutine[None, None, int]: ...


class Address(NamedTuple):
    """An address as it is in the settings: the port may be 0."""

    setting: str | None  # None: the public port's
    host: str
    port: int

    def bind(self) -> socket.socket:
        sock = listening_socket(self.host, self.port, self.setting)
        sock.setblocking(False)
        return sock


_addresses_decoder = msgspec.json.Decoder(list[Address])


class WorkerSpec(msgspec.Struct, frozen=True):
    """The message of a supervisor to a worker, on its command line."""

    slot: int
    directory: str  # of the workers' Unix sockets
    addresses: list[Address]  # of the public port and, if it has one of its own, of the admin port
    descriptors: list[int]  # of the sockets, in that order
    is_replacement: bool  # others accept meanwhile
    report: int  # the descriptor of the socket that is told how the start ended
    heartbeats: int  # and of the pipe for heartbeats


worker_spec_decoder = msgspec.json.Decoder(WorkerSpec)


class Started(msgspec.Struct, frozen=True, tag=True):
    """A worker takes requests."""

    lines: list[str]  # for the terminal
    has_tenants: bool


def addresses_of(settings: GatewaySettings) -> list[Address]:
    public = Address(None, settings.host, settings.port)
    if settings.admin_port is None:
        return [public]
    return [public, Address("admin_port", settings.admin_host, settings.admin_port)]


def worker_socket(directory: Path, slot: int, process_id: int) -> Path:
    return directory / f"{slot}.{process_id}.sock"


def worker_sockets(directory: Path) -> list[Path]:
    """The Unix sockets of workers, alive or not, the first slot first."""
    return sorted(directory.glob("*.sock"), key=lambda path: int(path.name.partition(".")[0]))


def ask(path: Path, word: str, timeout_s: float = _ASK_S) -> bytes:
    """The whole answer of the worker at `path`. Blocks; raises OSError."""
    with _asked(path, word, timeout_s) as connection:
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def take_listeners(path: Path) -> list[tuple[Address, socket.socket]]:
    """The listening sockets of the worker at `path`, none if it drains. Raises OSError."""
    with _asked(path, "listeners", PATIENT_S) as connection:
        told, descriptors, _, _ = socket.recv_fds(connection, 1 << 12, _MAX_LISTENERS)
    found = [_shared_socket(descriptor) for descriptor in descriptors]
    addresses = _addresses_decoder.decode(told) if told else []
    return list(zip(addresses, found, strict=True))


def _shared_socket(descriptor: int) -> socket.socket:
    """Processes share whether a socket blocks, and Python lets the copy of one that it thinks does block in all: then
    a worker that another was quicker than would hang in accept()."""
    sock = socket.socket(fileno=descriptor)
    sock.setblocking(False)
    sock.set_inheritable(False)
    return sock


@contextlib.contextmanager
def _asked(path: Path, word: str, timeout_s: float) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        connection.sendall(word.encode() + b"\n")
        yield connection


class GatewayWorker:
    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._directory = Path(spec.directory)
        self._path = worker_socket(self._directory, spec.slot, os.getpid())
        self._sockets = [_shared_socket(descriptor) for descriptor in spec.descriptors]
        self._is_replaced = asyncio.Event()
        self._servers: list[Stoppable] = []

    def public_listener(self) -> socket.socket:
        """Returns the public listener for a server, which closes it in the end."""
        return self._sockets[0].dup()

    def admin_listener(self) -> socket.socket:
        return self._sockets[1].dup()

    # -- the start

    def check(self, settings: GatewaySettings) -> None:
        """Raises where the addresses are no longer those that the supervisor listens on."""
        if addresses_of(settings) != self._spec.addresses:
            raise ConfigError("another host or port needs a new start, not a rolling restart")

    @contextlib.contextmanager
    def reporting(self) -> Iterator[Callable[[Started], None]]:
        """The supervisor is told how the start ended. One that is gone by then leaves its successor without a word of
        this worker, which ends."""
        for number in (signal.SIGHUP, signal.SIGUSR2):  # the latter may be sent to the whole group by mistake
            signal.signal(number, signal.SIG_IGN)
        faulthandler.register(signal.SIGQUIT)  # writes the stacks of all threads
        with socket.socket(fileno=self._spec.report) as starter:

            def tell(message: Started | Failed) -> None:
                try:
                    starter.sendall(msgspec.json.encode(message) + b"\n")
                except OSError:
                    self._is_replaced.set()

            try:
                yield tell
            except PenstockError as error:
                tell(Failed(error.code, redact(error.message)))
                sys.exit(1)

    async def warm_up(self, num_ready: Callable[[], Awaitable[int]], num_replicas: int) -> None:
        """A worker that takes another's place accepts when it has found the replicas ready, or some of them late."""
        if self._spec.is_replacement:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WARM_UP_S):
                    while await num_ready() < num_replicas:  # noqa: ASYNC110 - reports of others make it so
                        await asyncio.sleep(_LOOK_S)

    # -- metrics

    def merge_metrics(self, own: bytes) -> bytes:
        """The metrics of all workers, by label. Blocks."""
        texts = {self._label: own.decode()}
        for path in worker_sockets(self._directory):
            if path != self._path:
                with contextlib.suppress(OSError):  # it is gone, or hangs
                    label, _, text = ask(path, "metrics").decode().partition("\n")
                    texts[label] = text
        return merged(dict(sorted(texts.items())), "worker").encode()

    def tell_siblings(self, word: str) -> None:
        """Blocks."""
        for path in worker_sockets(self._directory):
            if path != self._path:
                with contextlib.suppress(OSError):
                    ask(path, word)

    @property
    def _label(self) -> str:
        """Stays with the slot, so that there are no more series after a restart than before."""
        return f"{self._spec.slot}-draining" if self._is_replaced.is_set() else str(self._spec.slot)

    # -- the Unix socket

    @contextlib.asynccontextmanager
    async def answering(
        self,
        look: Callable[[], Sequence[Registry]],
        num_ready: Callable[[], Awaitable[int]],
        reload: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[None]:
        async def metrics() -> bytes:
            registries = look()
            text = await asyncio.to_thread(lambda: b"".join([one.exposition() for one in registries]))
            return self._label.encode() + b"\n" + text

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                match (await reader.readuntil(b"\n")).strip():
                    case b"listeners":
                        self._send_listeners(writer)
                    case b"metrics":
                        writer.write(await metrics())
                    case b"ready":
                        writer.write(b"%d" % await num_ready())
                    case b"reload":
                        reload()
                    case b"drain":
                        self._is_replaced.set()
                await writer.drain()
            writer.close()

        server = await asyncio.start_unix_server(answer, str(self._path), limit=_MAX_WORD_BYTES)
        try:
            async with heartbeats_sent(FileIO(self._spec.heartbeats, "w")):
                yield
        finally:
            server.close()
            self._path.unlink(missing_ok=True)

    def _send_listeners(self, writer: asyncio.StreamWriter) -> None:
        """Past the transport, which takes bytes only; nothing was written, so the kernel has room."""
        if not self._sockets:
            return
        with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as connection:
            told = msgspec.json.encode(self._spec.addresses)
            socket.send_fds(connection, [told], [sock.fileno() for sock in self._sockets])

    # -- the end

    def accepts_by(self, server: Stoppable) -> None:
        """`server` listens on one of the sockets, or on a port that the workers share."""
        self._servers.append(server)

    async def until_told(self, told: asyncio.Event) -> None:
        """Waits until the worker is to end, because it is `told`, or because another has its place."""
        await _first_of(told.wait(), self._is_replaced.wait())
        while self._sockets:  # who holds one and does not accept would let clients wait for ever
            self._sockets.pop().close()

    async def hand_over(self, told: asyncio.Event) -> None:
        """Finishes what was begun if another has the place, unless the worker is `told` to end sooner."""
        if self._is_replaced.is_set():
            stops = [server.stop(HAND_OVER_S, idle_grace_s=_IDLE_GRACE_S) for server in self._servers]
            await _first_of(told.wait(), asyncio.gather(*stops))


async def _first_of(*waits: Awaitable[object]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
