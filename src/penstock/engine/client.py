"""The server's side of the engine: start its process, send it requests, hand out its tokens, start it again if it dies.

If the process dies, every open stream gets an error at once and a fresh process is started, with a growing pause if it
keeps dying.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from msgspec.structs import replace

from penstock.core.clock import Clock
from penstock.core.errors import Conflict, EngineFailed, EngineUnavailable, PenstockError, RequestAborted, all_errors
from penstock.core.measurements import EngineMeasurements
from penstock.core.parking import MemoryChange
from penstock.core.ranks import RankFigures
from penstock.core.request import Request, TokenEvent
from penstock.engine.accounts import Accounts
from penstock.engine.cache_contents import CacheContents
from penstock.engine.embedding_calls import EmbeddingCalls
from penstock.engine.expert_client import ExpertClient
from penstock.engine.lora_client import LoraClient
from penstock.engine.mailbox import FrameReader, encoder, frame, length_of
from penstock.engine.memory_kills import count_memory_kills
from penstock.engine.messages import (
    Abort,
    AdapterAnswer,
    AdapterState,
    Embedded,
    EngineInfo,
    ExpertState,
    Failed,
    FromEngine,
    Loading,
    Park,
    ParkAnswer,
    RankState,
    Ready,
    RebalanceAnswer,
    StepReport,
    Stop,
    Submit,
    ToEngine,
    Wake,
    from_engine_decoder,
)
from penstock.engine.rank_meters import RankMeters
from penstock.engine.speed import StepSpeed
from penstock.engine.token_stream import TokenStream

log = logging.getLogger("penstock.engine")


class EngineProcess(Protocol):
    async def wait(self) -> int: ...

    def kill(self) -> None: ...


Launch = Callable[[socket.socket], Awaitable[EngineProcess]]

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_STABLE_AFTER_S = 60.0  # a process that lived this long did not die of the last one's cause
_STOP_TIMEOUT_S = 5.0


class EngineState(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    PARKING = "parking"  # as soon as nothing runs any more
    PARKED = "parked"  # its process lives, and its device's memory is given back
    WAKING = "waking"
    FAILED = "failed"  # it cannot start, and trying again will not help
    STOPPED = "stopped"


Buffer = bytes | memoryview
_NOTHING: Mapping[str, Sequence[Buffer]] = {}
_BYTES, _BIN32 = struct.Struct(">BI"), 0xC6  # of msgpack
_LIVE = (EngineState.READY, EngineState.PARKING, EngineState.PARKED, EngineState.WAKING)  # it reads its mail


def encoded(request: Request) -> list[Buffer]:
    """A request as an engine is sent it, in pieces. Values of images are not copied: that would keep the interpreter's
    lock, and with it the event loop, for as long as it takes."""
    bare = [replace(image, values=b"") for image in request.images]
    whole = encoder.encode(Submit(replace(request, images=tuple(bare))))
    pieces: list[Buffer] = []
    at = 0
    for image, without in zip(request.images, bare, strict=True):
        own = encoder.encode(without)  # values are its last member, and without any they are two bytes
        end = whole.index(own, at) + len(own)
        pieces += (whole[at : end - 2], _BYTES.pack(_BIN32, len(image.values)), image.values)
        at = end
    pieces.append(whole[at:])
    return [length_of(sum(map(len, pieces))), *pieces]


class EngineClient:
    def __init__(
        self,
        launch: Launch,
        clock: Clock,
        *,
        on_loading: Callable[[Loading], None] = lambda _: None,
        on_report: Callable[[StepReport], None] = lambda _: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        stop_timeout_s: float = _STOP_TIMEOUT_S,
    ) -> None:
        """`sleep`: between the death of a process and the start of the next; `stop_timeout_s`: what a process that is
        told to stop has for it."""
        self._launch = launch
        self._clock = clock
        self._on_loading = on_loading
        self._on_report = on_report
        self._sleep = sleep
        self._stop_timeout_s = stop_timeout_s
        self._streams: dict[str, TokenStream] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._process: EngineProcess | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._changing: asyncio.Future[MemoryChange] | None = None  # a park or a wake that is not answered yet
        self._is_started = asyncio.Event()  # or cannot be
        self._failure: PenstockError | None = None
        self._last_words = ""  # why a process that ran is about to end
        self.state = EngineState.STARTING
        self.info: EngineInfo | None = None
        self.measured = EngineMeasurements()  # as it last said, after a step
        self.speed = StepSpeed()
        self.restarts = 0
        self.memory_kills = 0  # of its processes, by the kernel
        self.cache = CacheContents()
        self.ranks = RankMeters()
        self.adapters = LoraClient(self._send, as_error)
        self._accounts = Accounts()
        self.experts = ExpertClient(self._send, self._check_ready, as_error)
        self.embeddings = EmbeddingCalls(self._send, self._check_ready)
        self._sent_tokens = 0  # of all prompts, to the process that runs
        self._launched_s = 0.0

    async def start(self) -> EngineInfo:
        """Start the process and wait until it is ready; raises if it cannot be."""
        self._supervisor = asyncio.create_task(self._supervise())
        await self._is_started.wait()
        if self.info is None or self.state is not EngineState.READY:
            raise self._failure or EngineFailed("the engine process ended while it was starting")
        return self.info

    async def stop(self) -> None:
        """End the process: politely, then not. Open streams get an error."""
        patience_s = self._stop_timeout_s if self.state in _LIVE else 0.0  # while it loads it reads no mail
        self._enter(EngineState.STOPPED)
        self._fail_streams(RequestAborted("the server is shutting down"))
        self._send(Stop())
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), patience_s)
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)

    @property
    def num_open(self) -> int:
        """Requests that the engine has and has not finished."""
        return len(self._streams)

    @property
    def queued_tokens(self) -> int:
        """Tokens to compute before the sequences that are here can generate, what the engine has not read included."""
        measured = self.measured
        return measured.load.queued_tokens + self._sent_tokens - measured.totals.received_tokens

    def open(self, requests: list[Request], encoded: Mapping[str, Sequence[Buffer]] = _NOTHING) -> TokenStream:
        """Hand requests to the engine. The stream must be closed. `encoded`: by id, those that are encoded already."""
        self._check_ready()
        stream = TokenStream(self.abort, [request.id for request in requests])
        for request in requests:
            self._streams[request.id] = stream
            self._accounts.open(request, stream.meter)
            self._sent_tokens += len(request.prompt_ids)
            self._write(*(encoded.get(request.id) or (frame(Submit(request)),)))
        return stream

    def _check_ready(self) -> None:
        if self.state is not EngineState.READY:
            raise EngineUnavailable(f"the engine is {self.state.value}", retry_after_s=5.0)

    def abort(self, request_id: str) -> None:
        """End a request's work in the engine; nothing more is heard of it. Harmless if it has ended."""
        if self._streams.pop(request_id, None) is not None:
            self._accounts.close(request_id)
            self._send(Abort(request_id))

    async def park(self) -> MemoryChange:
        """Give the device's memory back once nothing runs; the cache is empty then. Nothing can be opened meanwhile."""
        return await self._change(Park(), EngineState.READY, EngineState.PARKING)

    async def wake(self) -> MemoryChange:
        """Take the memory again. If that cannot be, the engine stays parked."""
        return await self._change(Wake(), EngineState.PARKED, EngineState.WAKING)

    async def _change(self, message: Park | Wake, before: EngineState, meanwhile: EngineState) -> MemoryChange:
        if self.state is not before:
            raise Conflict(f"the engine is {self.state.value}")
        self._enter(meanwhile)
        self._changing = asyncio.get_running_loop().create_future()
        self._send(message)
        return await asyncio.shield(self._changing)  # whoever asked may go away; it is done all the same

    # -- the process -------------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        pause_s = _FIRST_PAUSE_S / 2
        while True:
            started_s = self._clock.now()
            kills = count_memory_kills()
            try:
                await self._run_process()
            except Exception:
                log.exception("the engine process could not be started, or said what nobody understands")
            if self.state is EngineState.STOPPED:
                return
            if self._failure is not None or self.info is None:
                self._enter(EngineState.FAILED)
                return
            self.memory_kills += count_memory_kills() > kills
            lived_s = self._clock.now() - started_s
            pause_s = _FIRST_PAUSE_S if lived_s > _STABLE_AFTER_S else min(2 * pause_s, _LONGEST_PAUSE_S)
            log.error("the engine process died; starting it again in %.1f s", pause_s)
            await self._sleep(pause_s)
            self.restarts += 1

    async def _run_process(self) -> None:
        """One life of the process: until its end of the socket closes."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._process = None
        try:
            self._launched_s = self._clock.now()
            with theirs:
                self._process = await self._launch(theirs)
            await self._read_mail(reader)
        finally:
            self._writer.close()
            self._writer = None
            self._bury()
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError):  # without its socket it is of no use
                    self._process.kill()
                await self._process.wait()

    async def _read_mail(self, reader: asyncio.StreamReader) -> None:
        frames = FrameReader()
        with contextlib.suppress(ConnectionResetError):
            while data := await reader.read(1 << 20):
                for payload in frames.feed(data):
                    self._receive(from_engine_decoder.decode(payload))

    def _bury(self) -> None:
        """Nothing runs any more: tell everybody who waits, and whoever counts."""
        if self.state in _LIVE:
            self._enter(EngineState.RESTARTING)
        if self._changing is not None and not self._changing.done():
            self._changing.set_exception(EngineFailed("the engine process died"))
            self._changing.exception()  # whoever asked may be gone
        why, self._last_words = f": {self._last_words}" if self._last_words else "", ""
        self._fail_streams(EngineFailed(f"the engine process died while running this request{why}"))
        self._sent_tokens = 0
        self._report(StepReport([]))
        self.cache.begin(0)
        self.adapters.end()
        self.ranks.clear()
        self.experts.end()

    @property
    def rank_figures(self) -> tuple[RankFigures, ...]:
        """Figures of each rank of the model; none: there is one rank."""
        info = self.info
        return self.ranks.figures(info.rank_reads, info.read_bytes_per_s) if info is not None else ()

    def _receive(self, message: FromEngine) -> None:
        match message:
            case StepReport():
                self._report(message)
                self._accounts.take(message)
                if (changes := message.cache) is not None:
                    self.cache.take(changes.stored, changes.removed, changes.on_host)
                for event in message.events:
                    self._deliver(event)
            case AdapterAnswer() | AdapterState():
                self.adapters.take(message)
            case Loading():
                self._on_loading(message)
            case Ready(info):
                self.info = self._with_start(info)
                self._accounts.begin(info.work, info.limits.block_size)
                self.cache.begin(info.routing_tokens)
                self.adapters.begin()
                self._enter(EngineState.READY)
                if self.restarts:
                    log.info("the engine process runs again: %s", startup_phases(self.info.startup_s))
            case RankState(reading):
                self.ranks.take(reading, self.measured.load.steps, self.measured.totals)
            case Embedded():
                self.embeddings.take(message)
            case ParkAnswer():
                self._changed(message)
            case ExpertState() | RebalanceAnswer():
                self.experts.take(message)
            case Failed(_, text) if self.state in _LIVE:
                self._last_words = text
            case Failed(EngineFailed.code, text) if self.info is not None:  # a rank, or its node, that is not back yet
                log.error("the engine process could not start again: %s", text)
            case Failed(code, text):
                self._failure = as_error(code, text)

    def _changed(self, answer: ParkAnswer) -> None:
        self._enter(EngineState.PARKED if answer.is_parked else EngineState.READY)
        assert self._changing is not None
        if answer.code:
            self._changing.set_exception(as_error(answer.code, answer.message))
            self._changing.exception()
        else:
            self._changing.set_result(answer.change)

    def _with_start(self, info: EngineInfo) -> EngineInfo:
        """The engine's own words, with what its server alone can know of the start: how long the process took to begin,
        and from its last phase until it was heard of here."""
        if not info.began_s:
            return info
        ended_s = info.began_s + sum(info.startup_s.values())
        spent_s = {"process": info.began_s - self._launched_s, **info.startup_s, "report": self._clock.now() - ended_s}
        return replace(info, startup_s={name: round(seconds, 3) for name, seconds in spent_s.items()})

    def _report(self, report: StepReport) -> None:
        self.measured = report.measured
        self.speed.observe(report.step)
        self._on_report(report)

    def _deliver(self, event: TokenEvent) -> None:
        stream = self._streams.get(event.request_id)
        if stream is None:
            return  # closed a moment ago; its abort is on the way
        if event.finish is not None:
            del self._streams[event.request_id]
            self._accounts.close(event.request_id)
        stream.push(event)

    def _fail_streams(self, error: PenstockError) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)
        self.embeddings.fail(error)

    def _send(self, message: ToEngine) -> None:
        self._write(frame(message))

    def _write(self, *pieces: Buffer) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.writelines(pieces)

    def _enter(self, state: EngineState) -> None:
        """A client that is stopped stays so: a process that has just become ready may not have heard of it."""
        if self.state is not EngineState.STOPPED:
            self.state = state
        if state not in (EngineState.STARTING, EngineState.RESTARTING):
            self._is_started.set()


def startup_phases(startup_s: dict[str, float]) -> str:
    """The seconds of each phase of a start that took some."""
    return ", ".join(f"{phase} {spent:.2f}" for phase, spent in startup_s.items() if spent >= 0.01)


def as_error(code: str, message: str) -> PenstockError:
    kinds: dict[str, type[PenstockError]] = {kind.code: kind for kind in all_errors()}
    return kinds.get(code, EngineFailed)(message)
