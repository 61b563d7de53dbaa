"""One request for text, whichever API it speaks, in a straight line: parse, prepare, generate, write.

An API is three things: the name of its route, how its bodies are parsed, and how its answers are written. They are
written to a `Sink`, which knows the protocol.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from penstock.api import relay, server_timing, sse
from penstock.api.asgi import Request
from penstock.api.openai import ChatRequest, new_id
from penstock.api.sink import Headers, Sink, SseStream, json_response
from penstock.core.clock import Clock
from penstock.core.errors import InvalidRequest, PenstockError
from penstock.engine.client import EngineClient
from penstock.server.choices import Piece
from penstock.server.drain import Drain
from penstock.server.gateway_headers import GatewayHeaders, GatewayTrust
from penstock.server.generation import Generation, Times
from penstock.server.offload import Offload
from penstock.server.prepare import Parse, PreparedRequest, Preparer
from penstock.server.prompt_scores import score_prompts
from penstock.server.recorder import Record, Recorder


class Writer(Protocol):
    """An answer in the form of its API: events of a stream, or whole."""

    def opening(self) -> list[bytes]: ...

    def events(self, piece: Piece) -> list[bytes]: ...

    def closing(self) -> list[bytes]: ...

    def whole(self, pieces: list[Piece]) -> bytes: ...

    def failure(self, error: PenstockError) -> list[bytes]:
        """Events that end a stream which broke off; none: it ends as the API's convention says."""


class Api(NamedTuple):
    """An endpoint that makes texts."""

    route: str  # in metrics and logs
    parse: Parse
    writer: Callable[[PreparedRequest, Generation], Writer]
    check: Callable[[PreparedRequest], None] = lambda prepared: None  # raises what only this server cannot do


class Pipeline:
    def __init__(
        self,
        preparer: Preparer,
        engine: EngineClient,
        recorder: Recorder,
        clock: Clock,
        drain: Drain,
        trust: GatewayTrust,
        offload: Offload,
        *,
        max_open: int,
        max_body_bytes: int,
    ) -> None:
        self._preparer = preparer
        self._engine = engine
        self._recorder = recorder
        self._clock = clock
        self._drain = drain
        self._trust = trust
        self._offload = offload
        self._max_open = max_open
        self._max_body_bytes = max_body_bytes

    async def generate(self, api: Api, request: Request, sink: Sink) -> None:
        with self._recorder.request(api.route, request.id, request.convention) as record:
            times = Times(self._clock.now())
            record.context = request.trace_context
            headers = self._trust.read(request, await request.body(self._max_body_bytes))
            prepared = await self._preparer.prepare(api.parse, headers)
            with prepared.held:
                await self._generate(api, request, sink, prepared, times, record)

    async def _generate(
        self, api: Api, request: Request, sink: Sink, prepared: PreparedRequest, times: Times, record: Record
    ) -> None:
        headers = prepared.headers
        api.check(prepared)
        times.tokenized_s = self._clock.now()
        # The client's id may repeat; what the engine calls the request must not.
        generation = Generation(prepared, new_id(request.id), times)
        if num_bytes := generation.num_pixel_bytes:
            await self._offload.run(num_bytes, generation.encode)
        is_relayed = headers.is_relayed if generation.options.stream else _relays_whole(headers, generation)
        relayed_as = headers.origin.id if is_relayed else ""
        with generation, self._drain.admit(generation, relayed_as):
            record.follow(generation)
            if generation.num_prompt_logprobs is not None:
                await request.while_connected(self._score_and_write(api, request, sink, prepared, generation))
                return
            generation.start(self._engine, max_open=self._max_open)
            writer = api.writer(prepared, generation)
            await request.while_connected(self._write(request, sink, headers, generation, writer))

    async def _score_and_write(
        self, api: Api, request: Request, sink: Sink, prepared: PreparedRequest, generation: Generation
    ) -> None:
        """An answer that tells the log probabilities of its prompt, which are found first."""
        assert generation.num_prompt_logprobs is not None
        generation.prompt_scores = await score_prompts(
            prepared.model, self._engine, prepared.prompts, generation.num_prompt_logprobs, new_id(request.id)
        )
        self._drain.check()
        generation.start(self._engine, max_open=self._max_open)
        await self._write(request, sink, prepared.headers, generation, api.writer(prepared, generation))

    async def count_tokens(
        self, parse: Callable[[bytes], ChatRequest], write: Callable[[int], bytes], request: Request, sink: Sink
    ) -> None:
        """A chat's prompt, counted and not sent to the engine."""
        with self._recorder.request("count_tokens", request.id, request.convention):
            body = await request.body(self._max_body_bytes)
            num_tokens = await self._preparer.count_tokens(parse, body)
        await json_response(sink, 200, write(num_tokens))

    async def _write(
        self, request: Request, sink: Sink, headers: GatewayHeaders, generation: Generation, writer: Writer
    ) -> None:
        pieces = generation.pieces(self._clock)
        # The first pieces are awaited before a byte is sent: until then a failure still has its own status.
        first: list[Piece] = await anext(pieces, [])
        parts = generation.times.parts
        timing = [(server_timing.HEADER, server_timing.encode(parts))] if parts else []
        if generation.options.stream:

            def error_event(error: PenstockError) -> bytes:
                return b"".join(writer.failure(error)) or request.error_event(error)

            frames = Frames(writer, error_event)
            if headers.is_relayed:
                frames = RelayedFrames(writer, error_event, headers, generation)
            await write_stream(sink, frames, first, pieces, timing)
            return
        if _relays_whole(headers, generation):
            relayed = RelayedWhole(writer, request.error_event, headers, generation)
            await self._write_relayed_whole(sink, relayed, first, pieces, timing)
            return
        async for more in pieces:
            first += more
        cost = [(relay.COST_HEADER.encode(), relay.cost_value(generation.cost))] if headers.is_from_gateway else []
        whole = await self._offload.write(generation.answer_bytes, partial(writer.whole, first))
        await json_response(sink, 200, whole, timing + cost)

    async def _write_relayed_whole(
        self, sink: Sink, frames: RelayedWhole, first: list[Piece], rest: AsyncIterator[list[Piece]], headers: Headers
    ) -> None:
        async with SseStream(sink, frames.error_event, headers):
            await sink.write(frames.opening() + frames.frame(first))
            async for pieces in rest:
                if frame := frames.frame(pieces):
                    await sink.write(frame)
            await sink.write(await self._offload.write(frames.answer_bytes, frames.closing))


def _relays_whole(headers: GatewayHeaders, generation: Generation) -> bool:
    """Log probabilities are not known from ids: an answer that has them begins anew elsewhere."""
    return headers.is_relayed_whole and not generation.options.stream and not generation.has_logprobs


async def write_stream(
    sink: Sink,
    frames: Frames,
    first: list[Piece],
    rest: AsyncIterator[list[Piece]],
    headers: Headers = (),
) -> None:
    """One write for all pieces that come together; nothing where they make no event."""
    async with SseStream(sink, frames.error_event, headers):
        await sink.write(frames.opening() + frames.frame(first))
        async for pieces in rest:
            if frame := frames.frame(pieces):
                await sink.write(frame)
        if closing := frames.closing():
            await sink.write(closing)


class Frames:
    """The events of an answer, as a client reads them."""

    def __init__(self, writer: Writer, error_event: Callable[[PenstockError], bytes]) -> None:
        self._writer = writer
        self._error_event = error_event

    def opening(self) -> bytes:
        return b"".join(self._writer.opening())

    def frame(self, pieces: list[Piece]) -> bytes:
        return b"".join([event for piece in pieces for event in self._writer.events(piece)])

    def closing(self) -> bytes:
        return b"".join(self._writer.closing())

    def error_event(self, error: PenstockError) -> bytes:
        return self._error_event(error)


class RelayedFrames(Frames):
    """The same with what another replica needs to carry it on; or carried on, without what the client has."""

    def __init__(
        self,
        writer: Writer,
        error_event: Callable[[PenstockError], bytes],
        headers: GatewayHeaders,
        generation: Generation,
    ) -> None:
        super().__init__(writer, error_event)
        self._generation = generation
        self._origin = msgspec.structs.replace(headers.origin, prompt_tokens=generation.num_prompt_tokens)
        self._is_resumed = headers.resume is not None
        self._replayed = generation.replayed
        self._units = relay.UnitWriter(headers.resume.num_events if headers.resume else 0)

    def opening(self) -> bytes:
        events = self._writer.opening() if self._replayed is None else self._writer.events(self._replayed)
        origin = b"" if self._is_resumed else relay.origin_comment(self._origin)
        return origin + self._units.known(events)

    def frame(self, pieces: list[Piece]) -> bytes:
        writer, units, n = self._writer, self._units, self._generation.options.n
        return b"".join(
            [
                units.unit(p.index, p.token_ids, 0 if p.index % n else p.cached_tokens, writer.events(p))
                for p in pieces  # siblings have the prompt in common, which is counted once
            ]
        )

    def closing(self) -> bytes:
        return relay.cost_comment(self._generation.cost) + self._units.known(self._writer.closing())

    def error_event(self, error: PenstockError) -> bytes:
        """Another replica would end where the request itself is at fault: the client is told."""
        is_requests = isinstance(error, InvalidRequest)
        ending = self._error_event(error) if is_requests else relay.carry_on_comment(error)
        return relay.cost_comment(self._generation.cost) + ending


class RelayedWhole(RelayedFrames):
    """An answer that its client gets as a whole, as far as it has come, and at last all of it."""

    def __init__(
        self,
        writer: Writer,
        error_event: Callable[[PenstockError], bytes],
        headers: GatewayHeaders,
        generation: Generation,
    ) -> None:
        super().__init__(writer, error_event, headers, generation)
        self._whole = relay.WholeWriter()
        self._pieces = list(generation.resumed_whole)

    @property
    def answer_bytes(self) -> int:
        return self._generation.answer_bytes

    def opening(self) -> bytes:
        return b"" if self._is_resumed else relay.origin_comment(self._origin)

    def frame(self, pieces: list[Piece]) -> bytes:
        self._pieces += pieces
        unit, n = self._whole.unit, self._generation.options.n
        return b"".join([unit(p.index, p.token_ids, 0 if p.index % n else p.cached_tokens) for p in pieces])

    def closing(self) -> bytes:
        return sse.event(self._writer.whole(self._pieces)) + relay.cost_comment(self._generation.cost)
