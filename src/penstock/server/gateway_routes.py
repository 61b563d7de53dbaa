"""Endpoints of a replica for gateways only: how it is, once or as it changes, and that it should drain, park, wake or
take another role.

GET  /v1/penstock/snapshot     a ReplicaReport
GET  /v1/penstock/snapshots    the same as server-sent events: on change, at most every 50 ms, at least every 250
GET  /v1/penstock/text         the model's tokenizer and chat template, a ModelText
POST /v1/penstock/drain        take no new work; answers at once with a snapshot
POST /v1/penstock/give_back    end relayed streams, by their ids, for a gateway that carries them on elsewhere
DELETE /v1/penstock/drain      take new work again, unless it ends or its device had a fault; answers with a snapshot
POST /v1/penstock/park         drain, then give the device's memory back; answers when that is done, with a ParkReport
POST /v1/penstock/wake         take it again, and work too; answers when a token has come out, with a ParkReport
POST /v1/penstock/role         another role from now on, for as long as this process runs; answers with a snapshot
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future

import msgspec
from msgspec.structs import replace

from penstock import __version__
from penstock.api import relay, sse
from penstock.api import tokenizer_bundle as model_text
from penstock.api.asgi import Request, Route
from penstock.api.parking import PARK_PATH, WAKE_PATH, ParkReport, read_park_request
from penstock.api.replica_report import AdapterNews, ReplicaReport, encode
from penstock.api.replica_role import ROLE_PATH, read_role_request
from penstock.api.sink import Sink, SseStream, json_response
from penstock.api.tokenizer_bundle import TokenizerBundle
from penstock.core.errors import EngineUnavailable
from penstock.core.measurements import DeviceReadings, EngineMeasurements, EngineSpeeds, ServingLimits
from penstock.core.settings import ServerSettings
from penstock.engine.client import EngineClient, EngineState
from penstock.server.devices import Devices
from penstock.server.drain import Drain
from penstock.server.gateway_headers import GatewayTrust
from penstock.server.parking import Parking
from penstock.server.served_model import ServedAdapter, ServedModel

_PERIOD_S = 0.05
_MAX_GIVE_BACK_BYTES = 1 << 20
_MAX_PARK_BYTES = _MAX_ROLE_BYTES = 1 << 10
_MAX_PERIODS = 5  # without news: a gateway takes a replica that is silent for a second for a sick one


class GatewayRoutes:
    def __init__(
        self,
        engine: EngineClient,
        drain: Drain,
        parking: Parking,
        devices: Devices,
        trust: GatewayTrust,
        state: Callable[[], EngineState],
        settings: ServerSettings,
    ) -> None:
        self._model = ""  # as long as it is loading
        self._adapters: dict[str, ServedAdapter] = {}
        self._text: Future[tuple[bytes, str]] | None = None  # encoded, and its digest
        self._engine = engine
        self._drain = drain
        self._parking = parking
        self._devices = devices
        self._trust = trust
        self._state = state
        self._role = settings.role
        self._max_open = settings.max_open
        self._boot = uuid.uuid4().hex

    def open(self, model: ServedModel, pool: Executor) -> None:
        self._model = model.name
        self._adapters = model.adapters
        self._text = pool.submit(_text_of, model)

    def routes(self) -> list[Route]:
        return [
            Route("GET", model_text.PATH, self.text),
            Route("GET", "/v1/penstock/snapshot", self.snapshot),
            Route("GET", "/v1/penstock/snapshots", self.snapshots),
            Route("POST", "/v1/penstock/drain", self.drain),
            Route("DELETE", "/v1/penstock/drain", self.undrain),
            Route("POST", relay.GIVE_BACK_PATH, self.give_back),
            Route("POST", PARK_PATH, self.park),
            Route("POST", WAKE_PATH, self.wake),
            Route("POST", ROLE_PATH, self.change_role),
        ]

    async def snapshot(self, request: Request, sink: Sink) -> None:
        self._trust.check(request)
        await json_response(sink, 200, encode(self.now()))

    async def snapshots(self, request: Request, sink: Sink) -> None:
        self._trust.check(request)
        await request.body(0)
        await request.while_connected(self._push(sink))

    async def text(self, request: Request, sink: Sink) -> None:
        self._trust.check(request)
        body, digest = await self._encoded()
        await json_response(sink, 200, body, [(b"etag", b'"%b"' % digest.encode())])

    async def encoded_text(self) -> bytes:
        """The model's ModelText."""
        return (await self._encoded())[0]

    async def _encoded(self) -> tuple[bytes, str]:
        if self._text is None:
            raise EngineUnavailable("the model is being loaded", retry_after_s=5.0)
        return await asyncio.wrap_future(self._text)

    async def drain(self, request: Request, sink: Sink) -> None:
        self._trust.check(request)
        request.check_is_json()
        self._drain.begin()
        await json_response(sink, 200, encode(self.now()))

    async def undrain(self, request: Request, sink: Sink) -> None:
        self._trust.check(request)
        self._drain.cancel()
        await json_response(sink, 200, encode(self.now()))

    async def give_back(self, request: Request, sink: Sink) -> None:
        self._trust.check(request)
        request.check_is_json()
        asked = relay.read_give_back(await request.body(_MAX_GIVE_BACK_BYTES))
        self._drain.give_back(frozenset(asked.ids))
        await json_response(sink, 200, encode(self.now()))

    async def park(self, request: Request, sink: Sink) -> None:
        self._trust.check(request)
        request.check_is_json()
        asked = read_park_request(await request.body(_MAX_PARK_BYTES))
        await self._answer(sink, self._parking.park(asked.wait_s))

    async def wake(self, request: Request, sink: Sink) -> None:
        self._trust.check(request)
        request.check_is_json()
        await self._answer(sink, self._parking.wake())

    async def change_role(self, request: Request, sink: Sink) -> None:
        """Gateways hear of it with the next report. Requests that it has go on: a role is about what is sent to it."""
        self._trust.check(request)
        request.check_is_json()
        self._role = read_role_request(await request.body(_MAX_ROLE_BYTES)).role
        await json_response(sink, 200, encode(self.now()))

    async def _answer(self, sink: Sink, change: Awaitable[ParkReport]) -> None:
        await json_response(sink, 200, msgspec.json.encode(await change))

    async def _push(self, sink: Sink) -> None:
        async with SseStream(sink) as stream:
            last, age = None, 0
            while True:
                is_last = self._drain.is_over
                report = self.now()
                if report != last or age >= _MAX_PERIODS:
                    await stream.write(sse.event(encode(report)))
                    last, age = report, 0
                if is_last:
                    return
                await asyncio.sleep(_PERIOD_S)
                age += 1

    def now(self) -> ReplicaReport:
        engine = self._engine
        return ReplicaReport(
            boot=self._boot,
            model=self._model,
            state=self._state(),
            is_draining=self._drain.is_begun,
            restarts=engine.restarts,
            memory_kills=engine.memory_kills,
            version=__version__,
            text=self._text.result()[1] if self._text is not None and self._text.done() else "",
            adapters=self._adapter_news() if self._adapters else (),
            startup_s=engine.info.startup_s if engine.info is not None else None,
            can_park=engine.info is not None and engine.info.can_park,
            role=self._role,
            kv_port=engine.info.kv_port if engine.info is not None else 0,
            kv_layout=engine.info.kv_layout if engine.info is not None else "",
            measured=self._measured(),
        )

    def _measured(self) -> EngineMeasurements:
        """Measurements of the engine, and what the server sees itself."""
        engine, info = self._engine, self._engine.info
        return replace(
            engine.measured,
            load=replace(
                engine.measured.load,
                num_open=engine.num_open,
                queued_tokens=engine.queued_tokens,
                expert_imbalance=engine.experts.rank_imbalance,
            ),
            limits=replace(info.limits if info is not None else ServingLimits(), max_open=self._max_open),
            speeds=EngineSpeeds(
                engine.speed.prefill_tokens_per_s,
                engine.speed.decode_step_s,
                info.host_tokens_per_s if info is not None else None,
                engine.measured.speeds.kv_pull_tokens_per_s,
            ),
            device=DeviceReadings(
                self._devices.readings,
                self._devices.fault,
                info.layout if info is not None else "",
                engine.rank_figures,
            ),
        )

    def _adapter_news(self) -> tuple[AdapterNews, ...]:
        on_device = set(self._engine.adapters.device)
        return tuple(AdapterNews(name, one.digest, one.digest in on_device) for name, one in self._adapters.items())


def _text_of(model: ServedModel) -> tuple[bytes, str]:
    encoded = model_text.encode(
        TokenizerBundle(
            tokenizer=model.tokenizer.to_json(),
            special_tokens=model.tokenizer.special_tokens(),
            chat_template=model.chat_template.source,
            vocab_size=model.config.vocab_size,
            bos_token_id=model.config.bos_token_id,
            tool_format=model.chat_template.tool_format.name,
            reasoning_format=reasoning.name if (reasoning := model.chat_template.reasoning) is not None else "none",
            images=model.images.processor if model.images is not None else None,
        )
    )
    return encoded, model_text.digest(encoded)
