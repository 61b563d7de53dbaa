"""One exchange with a client, whichever API it speaks: read the request, run it, write the answer, note it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from penstock.api import relay, server_timing
from penstock.api.asgi import Request
from penstock.api.openai import GenerationRequest, new_id
from penstock.api.openai.guided import GuideAsked
from penstock.api.sink import Sink, SseStream, json_response
from penstock.core.clock import Clock
from penstock.core.errors import InvalidRequest, PenstockError, UnsupportedParameter
from penstock.engine.client import EngineClient
from penstock.server.choices import Piece
from penstock.server.drain import Drain
from penstock.server.gateway_headers import GatewayHeaders, GatewayTrust
from penstock.server.generation import Generation, Times, check_choices
from penstock.server.guides import GuideTrials
from penstock.server.offload import Offload
from penstock.server.recorder import Recorder
from penstock.server.served_model import ServedModel
from penstock.server.tool_calling import ToolCalling
from penstock.server.watermarks import Watermarks
from penstock.text.stops import StopStrings


class Answer(Protocol):
    """An answer in the form of its endpoint: a stream of events, or whole."""

    def opening(self) -> list[bytes]: ...

    def events(self, piece: Piece) -> list[bytes]: ...

    def closing(self) -> list[bytes]: ...

    def whole(self, pieces: list[Piece]) -> bytes: ...


@dataclass(frozen=True)
class PreparedRequest:
    """What a request comes down to."""

    wanted: GenerationRequest
    prompts: list[list[int]]
    answer: Callable[[Generation], Answer]
    guide: GuideAsked | None = None  # what the answer must look like; None: what `wanted` says
    calling: ToolCalling | None = None  # of tools, where they may be called


class Exchange:
    def __init__(
        self,
        model: ServedModel,
        engine: EngineClient,
        recorder: Recorder,
        clock: Clock,
        drain: Drain,
        trust: GatewayTrust,
        guides: GuideTrials,
        offload: Offload,
        watermarks: Watermarks,
        *,
        max_open: int,
        max_body_bytes: int,
    ) -> None:
        self._model = model
        self._engine = engine
        self._recorder = recorder
        self._clock = clock
        self._drain = drain
        self._trust = trust
        self._guides = guides
        self._offload = offload
        self._watermarks = watermarks
        self._max_open = max_open
        self._max_body_bytes = max_body_bytes

    async def generate(
        self, request: Request, sink: Sink, route: str, read: Callable[[GatewayHeaders], PreparedRequest]
    ) -> None:
        """`read` makes of the request what it comes down to, perhaps in another thread."""
        with self._recorder.request(route, request.id, request.convention) as record:
            times = Times(self._clock.now())
            record.context = request.trace_context
            headers = self._trust.read(request, await request.body(self._max_body_bytes))
            self._model.check_generates()
            prepared, asked, stops = await self._offload.run(len(headers.body), partial(self._prepare, read, headers))
            guide = await self._guides.check(asked, headers.tenancy.id) if asked is not None else None
            watermark = await self._watermarks.of(headers, prepared.wanted)
            times.tokenized_s = self._clock.now()
            # The client's id may repeat; what the engine calls the request must not.
            generation = Generation(
                prepared.wanted,
                prepared.prompts,
                self._model,
                new_id(request.id),
                times,
                stops=stops,
                fallback_seed=headers.origin.seed,
                resume=headers.resume,
                namespace=headers.namespace,
                guide=guide,
                calling=prepared.calling,
                watermark=watermark,
                tenancy=headers.tenancy,
            )
            may_go = headers.is_relayed and generation.options.stream
            with generation, self._drain.admit(generation, headers.origin.id if may_go else ""):
                record.follow(generation)
                generation.start(self._engine, max_open=self._max_open)
                answer = prepared.answer(generation)
                news = generation.pieces(self._clock)
                news = news if asked is None else _naming(news, asked.param)
                await request.while_connected(self._answer(request, sink, headers, generation, answer, news))

    async def reply(self, request: Request, route: str, read: Callable[[bytes], bytes]) -> bytes:
        """The answer to a request that needs no engine."""
        with self._recorder.request(route, request.id, request.convention):
            body = await request.body(self._max_body_bytes)
            return await self._offload.run(len(body), partial(read, body))

    def _prepare(
        self, read: Callable[[GatewayHeaders], PreparedRequest], headers: GatewayHeaders
    ) -> tuple[PreparedRequest, GuideAsked | None, StopStrings]:
        prepared = read(headers)
        check_choices(prepared.wanted, prepared.prompts, max_open=self._max_open)
        stops = StopStrings(prepared.wanted.stops(), include=bool(prepared.wanted.include_stop_str_in_output))
        return prepared, prepared.guide or prepared.wanted.guide(), stops

    async def _answer(
        self,
        request: Request,
        sink: Sink,
        headers: GatewayHeaders,
        generation: Generation,
        answer: Answer,
        news: AsyncIterator[list[Piece]],
    ) -> None:
        # The first news is awaited before a word is sent: until then a failure still has its own status.
        pieces: list[Piece] = await anext(news, [])
        parts = generation.times.parts
        timing = [(server_timing.HEADER, server_timing.encode(parts))] if parts else []
        if not generation.options.stream:
            async for more in news:
                pieces += more
            cost = [(relay.COST_HEADER.encode(), relay.cost_value(generation.cost))] if headers.is_from_gateway else []
            whole = await self._offload.write(generation.answer_bytes, partial(answer.whole, pieces))
            await json_response(sink, 200, whole, timing + cost)
            return
        writer = _Relayed(answer, headers, generation, request) if headers.is_relayed else _Plain(answer)
        async with SseStream(sink, writer.error_event or request.error_event, timing) as stream:
            await stream.write(writer.opening() + writer.frame(pieces))
            async for pieces in news:
                if frame := writer.frame(pieces):
                    await stream.write(frame)
            if closing := writer.closing():
                await stream.write(closing)


class _Plain:
    """The events of an answer, as a client reads them."""

    error_event = None  # the client's own kind

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def opening(self) -> bytes:
        return b"".join(self._answer.opening())

    def frame(self, pieces: list[Piece]) -> bytes:
        return b"".join([event for piece in pieces for event in self._answer.events(piece)])

    def closing(self) -> bytes:
        return b"".join(self._answer.closing())


class _Relayed:
    """The same with what another replica needs to carry it on; or carried on, without what the client has."""

    def __init__(self, answer: Answer, headers: GatewayHeaders, generation: Generation, request: Request) -> None:
        self._answer = answer
        self._request = request
        self._generation = generation
        self._origin = msgspec.structs.replace(headers.origin, prompt_tokens=generation.num_prompt_tokens)
        self._is_resumed = headers.resume is not None
        self._replayed = generation.replayed
        self._units = relay.UnitWriter(headers.resume.num_events if headers.resume else 0)

    def opening(self) -> bytes:
        events = self._answer.opening() if self._replayed is None else self._answer.events(self._replayed)
        origin = b"" if self._is_resumed else relay.origin_comment(self._origin)
        return origin + self._units.known(events)

    def frame(self, pieces: list[Piece]) -> bytes:
        answer, units, n = self._answer, self._units, self._generation.options.n
        return b"".join(
            [
                units.unit(p.index, p.token_ids, 0 if p.index % n else p.cached_tokens, answer.events(p))
                for p in pieces  # siblings have the prompt in common, which is counted once
            ]
        )

    def closing(self) -> bytes:
        return relay.cost_comment(self._generation.cost) + self._units.known(self._answer.closing())

    def error_event(self, error: PenstockError) -> bytes:
        """Another replica would end where the request itself is at fault: the client is told."""
        is_requests = isinstance(error, InvalidRequest)
        ending = self._request.error_event(error) if is_requests else relay.carry_on_comment(error)
        return relay.cost_comment(self._generation.cost) + ending


async def _naming(news: AsyncIterator[list[Piece]], param: str) -> AsyncIterator[list[Piece]]:
    """The news of a guided answer; one that fails for what its guide says names the field that brought it."""
    try:
        async for pieces in news:
            yield pieces
    except UnsupportedParameter as error:
        raise UnsupportedParameter(f"{param}: {error.message}", param=param) from None
