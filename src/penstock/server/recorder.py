"""Records of every request: one log line, and its metrics. Every exit is counted once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from penstock import __version__
from penstock.api.errors import OPENAI, Convention
from penstock.core.clock import Clock
from penstock.core.errors import PenstockError
from penstock.core.request import Cost, KvSource, RequestTimings
from penstock.core.slo import Objective, Slo
from penstock.engine.accounts import Meter
from penstock.engine.expert_client import ExpertClient
from penstock.engine.messages import EngineInfo
from penstock.observe import catalog
from penstock.observe.device_catalog import DEVICE_CATALOG
from penstock.observe.registry import Counter, Registry
from penstock.observe.websocket_catalog import WEBSOCKET_CATALOG
from penstock.server.engine_tally import EngineTally, RankNews
from penstock.server.generation import Generation

log = logging.getLogger("penstock.request")

_MAX_TENANTS = 200  # with series of their own
_OTHERS = "other"
_ONE_RANK = RankNews((), ())


@dataclass
class TextWork:
    """Work of a request for vectors or scores."""

    num_texts: int
    num_tokens: int
    tenant: str
    model: str = ""
    cost: Cost = Cost()  # noqa: RUF009 (frozen)


@dataclass
class Record:
    generation: Generation | None = None
    texts: TextWork | None = None
    context: Mapping[bytes, bytes] = field(default_factory=dict)  # headers that say which trace it is part of

    def follow(self, generation: Generation) -> None:
        self.generation = generation


class RequestRecorder(Protocol):
    """Is told of every request."""

    def request(
        self, route: str, request_id: str, convention: Convention = OPENAI
    ) -> AbstractContextManager[Record]: ...


class Finished(NamedTuple):
    """One request, over."""

    id: str
    model: str
    route: str
    status: int
    outcome: str  # ok, or an error's code
    total_s: float
    is_stream: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float | None = None
    parts: Mapping[str, float] = {}  # of that
    cost: Cost = Cost()  # so far: what was under way when it ended is not in it
    decode_s: float = 0.0  # from the first token to the last
    context: Mapping[bytes, bytes] = {}  # as in the record
    kv_source: KvSource | None = None  # where KV blocks of its prompt could be pulled from
    engine: RequestTimings | None = None  # what came of that, among others

    @classmethod
    def of(
        cls, record: Record, model: str, route: str, request_id: str, status: int, outcome: str, total_s: float
    ) -> Finished:
        generation, tokens = record.generation, record.texts.num_tokens if record.texts is not None else 0
        if generation is None:
            facts = (request_id, model, route, status, outcome, total_s)
            return cls(*facts, prompt_tokens=tokens, context=record.context)
        return cls(
            request_id,
            model,
            route,
            status,
            outcome,
            total_s,
            generation.options.stream,
            generation.num_prompt_tokens,
            generation.num_cached_tokens,
            generation.num_made_here,
            generation.times.ttft_s,
            generation.times.parts,
            generation.cost,
            generation.times.decode_s,
            record.context,
            generation.kv_source,
            generation.times.engine,
        )


class Recorder:
    """Belongs to the event loop's thread; only what `exposition` returns may be called in another."""

    def __init__(self, clock: Clock, model: str, slo: Slo) -> None:
        self._clock = clock
        self.model = model
        self._slo = slo
        self.registry = Registry((*catalog.CATALOG, *DEVICE_CATALOG, *WEBSOCKET_CATALOG))
        self._engine = EngineTally(self.registry)
        self.engine_report = self._engine.take  # the engine's news after a step
        self._open = self.registry.count(catalog.REQUESTS_OPEN)
        self._ttft, self._tpot, self._total = (
            self.registry.spread(metric, model) for metric in (catalog.TTFT, catalog.TPOT, catalog.REQUEST_LATENCY)
        )
        self._texts, self._text_tokens = (
            self.registry.count(metric, model) for metric in (catalog.EMBEDDED_TEXTS, catalog.EMBEDDED_TOKENS)
        )
        self._images, self._image_tokens = (
            self.registry.count(metric, model) for metric in (catalog.IMAGES, catalog.IMAGE_TOKENS)
        )
        self._tenants: dict[str, tuple[Counter, Counter]] = {}
        self.listeners: list[Callable[[Finished], None]] = []  # told of every request, at its end

    @contextmanager
    def request(self, route: str, request_id: str, convention: Convention = OPENAI) -> Iterator[Record]:
        started_s = self._clock.now()
        record = Record()
        status, outcome = 500, "cancelled"
        self._open.value += 1
        try:
            yield record
            status, outcome = 200, "ok"
        except PenstockError as error:
            status, outcome = convention.status(error), error.code
            raise
        except Exception:
            outcome = PenstockError.code
            raise
        finally:
            self._open.value -= 1
            self.registry.count(catalog.REQUESTS, route, str(status), outcome).value += 1
            total_s = self._clock.now() - started_s
            self._finish(record, route, request_id, outcome, total_s)
            if self.listeners:
                finished = Finished.of(record, self.model, route, request_id, status, outcome, total_s)
                for listener in self.listeners:
                    listener(finished)

    def pays(self, tenant: str, meter: Meter) -> None:
        """Nothing more is read of these requests; what they have cost, and may still cost, is this tenant's."""
        counts = self._tenants.get(tenant)
        if counts is None:
            counts = self._tenant(tenant)
        device_s, kv_block_s = counts

        def pay(cost: Cost) -> None:
            device_s.value += cost.device_s
            kv_block_s.value += cost.kv_block_s

        pay(meter.settle(pay))

    def exposition(
        self,
        *,
        is_ready: bool,
        restarts: int,
        info: EngineInfo | None,
        ranks: RankNews = _ONE_RANK,
        experts: ExpertClient | None = None,
    ) -> Callable[[], bytes]:
        """Makes the text of how things stand now. `ranks`: of the model, where there are several; `experts`: of a
        mixture."""
        count = self.registry.count
        count(catalog.ENGINE_READY).value = float(is_ready)
        count(catalog.ENGINE_RESTARTS).value = restarts
        if info is not None:
            what = (self.model, info.device, info.device_name, info.number_format, info.quant, __version__)
            self.registry.replace(catalog.REPLICA_INFO, {what: 1})
            for metric, spent_s in ((catalog.STARTUP, info.startup_s), (catalog.STARTUP_CPU, info.startup_cpu_s)):
                self.registry.replace(metric, {(phase,): seconds for phase, seconds in spent_s.items()})
        self._engine.look(info)
        self._engine.look_at_ranks(ranks)
        if experts is not None:
            self._engine.look_at_experts(experts.load, experts.recent)
        return self.registry.exposition

    # -- inside

    def _finish(self, record: Record, route: str, request_id: str, outcome: str, total_s: float) -> None:
        generation = record.generation
        if record.texts is not None:
            self._finish_texts(record.texts, route, request_id, outcome, total_s)
            return
        if generation is None:
            log.info("id=%s route=%s outcome=%s total_ms=%.1f", request_id, route, outcome, 1e3 * total_s)
            return
        ttft_s, tokens, spread = generation.times.ttft_s, generation.num_made_here, self.registry.spread
        if ttft_s is not None:
            self._observe_times(generation, ttft_s)
        self._total.observe(total_s)
        if outcome == "ok":
            self._judge(Objective.LATENCY, total_s)
        spread(catalog.PROMPT_TOKENS, self.model).observe(generation.num_prompt_tokens)
        spread(catalog.OUTPUT_TOKENS, self.model).observe(tokens)
        self._images.value += generation.num_images
        self._image_tokens.value += generation.num_image_tokens
        if generation.meter is not None:
            self.pays(generation.tenant, generation.meter)
        log.info(
            "id=%s route=%s outcome=%s prompt=%d cached=%d output=%d ttft_ms=%s total_ms=%.1f device_ms=%.2f",
            request_id,
            route,
            outcome,
            generation.num_prompt_tokens,
            generation.num_cached_tokens,
            tokens,
            "-" if ttft_s is None else f"{1e3 * ttft_s:.1f}",
            1e3 * total_s,
            1e3 * generation.cost.device_s,
        )

    def _finish_texts(self, work: TextWork, route: str, request_id: str, outcome: str, total_s: float) -> None:
        self._total.observe(total_s)
        if outcome == "ok":
            self._judge(Objective.LATENCY, total_s)
            self._texts.value += work.num_texts
            self._text_tokens.value += work.num_tokens
        (self._tenants.get(work.tenant) or self._tenant(work.tenant))[0].value += work.cost.device_s
        log.info(
            "id=%s route=%s outcome=%s texts=%d tokens=%d total_ms=%.1f device_ms=%.2f",
            request_id,
            route,
            outcome,
            work.num_texts,
            work.num_tokens,
            1e3 * total_s,
            1e3 * work.cost.device_s,
        )

    def _observe_times(self, generation: Generation, ttft_s: float) -> None:
        times = generation.times
        assert times.first_token_s is not None
        assert times.last_token_s is not None
        self._ttft.observe(ttft_s)
        self._judge(Objective.TTFT, ttft_s)
        for part, seconds in times.parts.items():
            self.registry.spread(catalog.TTFT_PART, self.model, part).observe(seconds)
        per_choice = generation.num_made_here / generation.num_choices
        if per_choice > 1:
            tpot_s = (times.last_token_s - times.first_token_s) / (per_choice - 1)
            self._tpot.observe(tpot_s)
            self._judge(Objective.TPOT, tpot_s)

    def _judge(self, objective: Objective, seconds: float) -> None:
        target_s = self._slo.target(objective)
        if target_s is not None:
            met = str(seconds <= target_s).lower()
            self.registry.count(catalog.SLO_REQUESTS, self.model, objective, met).value += 1

    def _tenant(self, tenant: str) -> tuple[Counter, Counter]:
        """Counters of a tenant. A series with a name keeps it: moved to the others and back, it would be no counter."""
        name = tenant if len(self._tenants) < _MAX_TENANTS else _OTHERS
        count = self.registry.count
        found = count(catalog.DEVICE_SECONDS, self.model, name), count(catalog.KV_BLOCK_SECONDS, self.model, name)
        if name is not _OTHERS:
            self._tenants[tenant] = found
        return found
