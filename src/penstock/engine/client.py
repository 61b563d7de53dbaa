"""The server's side of the engine: start its process, send it requests, hand out its tokens, start it again if it dies.

A `TokenStream` is ownership: closing it, for whatever reason, ends the work in the engine. If the process dies, every
open stream gets an error at once and a fresh process is started, with a growing pause if it keeps dying.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import socket
from collections.abc import Awaitable, Callable
from types import TracebackType

import msgspec

from penstock.core.clock import Clock
from penstock.core.errors import EngineFailed, EngineUnavailable, PenstockError, RequestAborted, all_errors
from penstock.core.request import FinishReason, Request, TokenEvent
from penstock.engine.mailbox import FrameReader, frame
from penstock.engine.messages import (
    Abort,
    EngineInfo,
    EngineStats,
    Failed,
    FromEngine,
    Loading,
    Ready,
    StepReport,
    Stop,
    Submit,
    ToEngine,
)

log = logging.getLogger("penstock.engine")

Launch = Callable[[socket.socket], Awaitable[asyncio.subprocess.Process]]

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_STABLE_AFTER_S = 60.0  # a process that lived this long may be restarted without a pause
_STOP_TIMEOUT_S = 5.0


class EngineState(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"  # it cannot start, and trying again will not help
    STOPPED = "stopped"


class TokenStream:
    """The news of a group of requests, in order. Use it as a context manager: leaving it aborts what still runs."""

    def __init__(self, client: EngineClient, request_ids: list[str]) -> None:
        self._client = client
        self._request_ids = request_ids
        self._events: list[TokenEvent] = []
        self._error: PenstockError | None = None
        self._news = asyncio.Event()

    def push(self, event: TokenEvent) -> None:
        self._events.append(event)
        self._news.set()

    def fail(self, error: PenstockError) -> None:
        self._error = error
        self._news.set()

    async def next(self) -> list[TokenEvent]:
        """All the news since the last call; waits if there is none. A slow reader gets more at a time."""
        await self._news.wait()
        self._news.clear()
        if self._error is not None:
            raise self._error
        events, self._events = self._events, []
        for event in events:
            if event.finish is FinishReason.ERROR:
                raise EngineFailed(event.error or "the engine failed while running this request")
        return events

    def close(self) -> None:
        """The work of one reader is over: whatever still runs for it ends."""
        for request_id in self._request_ids:
            self._client.abort(request_id)

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class EngineClient:
    def __init__(
        self,
        launch: Launch,
        clock: Clock,
        *,
        on_loading: Callable[[Loading], None] = lambda _: None,
        on_report: Callable[[EngineStats], None] = lambda _: None,
    ) -> None:
        self._launch = launch
        self._clock = clock
        self._on_loading = on_loading
        self._on_report = on_report
        self._streams: dict[str, TokenStream] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()
        self._failure: PenstockError | None = None
        self.state = EngineState.STARTING
        self.info: EngineInfo | None = None
        self.stats = EngineStats()
        self.restarts = 0

    async def start(self) -> EngineInfo:
        """Start the process and wait until it is ready; raises if it cannot be."""
        self._supervisor = asyncio.create_task(self._supervise())
        async with self._changed:
            await self._changed.wait_for(lambda: self.state not in (EngineState.STARTING, EngineState.RESTARTING))
        if self.info is None or self.state is not EngineState.READY:
            raise self._failure or EngineFailed("the engine process ended while it was starting")
        return self.info

    async def stop(self) -> None:
        """End the process: politely, then not. Open streams get an error."""
        await self._enter(EngineState.STOPPED)
        self._fail_streams(RequestAborted("the server is shutting down"))
        self._send(Stop())
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _STOP_TIMEOUT_S)
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)

    @property
    def num_open(self) -> int:
        """Requests that the engine has and has not finished."""
        return len(self._streams)

    def open(self, requests: list[Request]) -> TokenStream:
        """Hand requests to the engine. The stream must be closed."""
        if self.state is not EngineState.READY:
            raise EngineUnavailable(f"the engine is {self.state.value}", retry_after_s=5.0)
        stream = TokenStream(self, [request.id for request in requests])
        for request in requests:
            self._streams[request.id] = stream
            self._send(Submit(request))
        return stream

    def abort(self, request_id: str) -> None:
        """End a request's work in the engine; nothing more is heard of it. Harmless if it has ended."""
        if self._streams.pop(request_id, None) is not None:
            self._send(Abort(request_id))

    # -- the process -------------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            started_s = self._clock.now()
            await self._run_process()
            self._fail_streams(EngineFailed("the engine process died while running this request"))
            if self.state is EngineState.STOPPED:
                return
            never_ready = self.info is None
            if self._failure is not None or never_ready:
                await self._enter(EngineState.FAILED)
                return
            await self._enter(EngineState.RESTARTING)
            pause_s = _FIRST_PAUSE_S if self._clock.now() - started_s > _STABLE_AFTER_S else pause_s * 2
            log.error("the engine process died; starting it again in %.1f s", pause_s)
            await asyncio.sleep(min(pause_s, _LONGEST_PAUSE_S))
            self.restarts += 1

    async def _run_process(self) -> None:
        """One life of the process: until its end of the socket closes."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await self._launch(theirs)
        ours.setblocking(False)
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        frames, decoder = FrameReader(), msgspec.msgpack.Decoder(FromEngine)
        try:
            while data := await reader.read(1 << 20):
                for payload in frames.feed(data):
                    await self._receive(decoder.decode(payload))
        except ConnectionResetError:
            pass
        finally:
            self._writer.close()
            self._writer = None
        with contextlib.suppress(ProcessLookupError):  # it closed its socket: whatever is left of it is of no use
            self._process.kill()
        await self._process.wait()

    async def _receive(self, message: FromEngine) -> None:
        match message:
            case StepReport(events, stats):
                self.stats = stats
                self._on_report(stats)
                for event in events:
                    self._deliver(event)
            case Loading():
                self._on_loading(message)
            case Ready(info):
                self.info = info
                await self._enter(EngineState.READY)
            case Failed(code, text):
                self._failure = _as_error(code, text)

    def _deliver(self, event: TokenEvent) -> None:
        stream = self._streams.get(event.request_id)
        if stream is None:
            return  # closed a moment ago; its abort is on the way
        if event.finish is not None:
            del self._streams[event.request_id]
        stream.push(event)

    def _fail_streams(self, error: PenstockError) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)

    def _send(self, message: ToEngine) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(message))

    async def _enter(self, state: EngineState) -> None:
        async with self._changed:
            self.state = state
            self._changed.notify_all()


def _as_error(code: str, message: str) -> PenstockError:
    kinds: dict[str, type[PenstockError]] = {kind.code: kind for kind in all_errors()}
    return kinds.get(code, EngineFailed)(message)
