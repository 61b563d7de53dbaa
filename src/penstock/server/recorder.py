"""What the server notes of every request: one log line, and its metrics. Every exit is counted once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.api.errors import OPENAI, Convention
from penstock.core.clock import Clock
from penstock.core.errors import PenstockError
from penstock.core.slo import Slo
from penstock.engine.messages import EngineStats
from penstock.observe import catalog
from penstock.observe.prometheus import Metrics
from penstock.server.generation import Generation

log = logging.getLogger("penstock.request")


@dataclass
class Record:
    generation: Generation | None = None

    def follow(self, generation: Generation) -> None:
        self.generation = generation


class Recorder:
    def __init__(self, metrics: Metrics, clock: Clock, model: str, slo: Slo) -> None:
        self._metrics = metrics
        self._clock = clock
        self._model = model
        self._slo = slo
        self._open = 0

    @contextmanager
    def request(self, route: str, request_id: str, convention: Convention = OPENAI) -> Iterator[Record]:
        started_s = self._clock.now()
        record = Record()
        status, outcome = 500, "cancelled"
        self._count_open(+1)
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
            self._count_open(-1)
            self._metrics.inc(catalog.REQUESTS, route, str(status), outcome)
            self._finish(record, route, request_id, outcome, self._clock.now() - started_s)

    def engine_report(self, stats: EngineStats) -> None:
        """The engine's news after a step."""
        metrics = self._metrics
        metrics.set(catalog.SEQUENCES_RUNNING, stats.num_running)
        metrics.set(catalog.SEQUENCES_WAITING, stats.num_waiting)
        metrics.set(catalog.KV_USAGE, stats.kv_usage)
        metrics.set(catalog.KV_CACHED_BLOCKS, stats.cached_blocks)
        metrics.set(catalog.STEP_BUDGET, stats.budget_tokens)
        metrics.set_total(catalog.STEPS, stats.steps)
        metrics.set_total(catalog.PREEMPTIONS, stats.preemptions)
        metrics.set_total(catalog.PREFIX_TOKENS, stats.prompt_tokens)
        metrics.set_total(catalog.PREFIX_HIT_TOKENS, stats.cached_tokens)
        metrics.set_total(catalog.GENERATED_TOKENS, stats.generated_tokens)
        metrics.set_total(catalog.KV_EVICTIONS, stats.evictions)
        if stats.step_s > 0:
            metrics.observe(catalog.STEP_TIME, stats.step_s)
            metrics.observe(catalog.BATCH_SIZE, stats.step_sequences)
            metrics.observe(catalog.STEP_TOKENS, stats.step_tokens)

    def exposition(self, *, is_ready: bool, restarts: int) -> bytes:
        self._metrics.set(catalog.ENGINE_READY, float(is_ready))
        self._metrics.set_total(catalog.ENGINE_RESTARTS, restarts)
        return self._metrics.exposition()

    def _count_open(self, change: int) -> None:
        self._open += change
        self._metrics.set(catalog.REQUESTS_OPEN, self._open)

    def _finish(self, record: Record, route: str, request_id: str, outcome: str, total_s: float) -> None:
        generation = record.generation
        if generation is None:
            log.info("id=%s route=%s outcome=%s total_ms=%.1f", request_id, route, outcome, 1e3 * total_s)
            return
        times, tokens = generation.times, generation.num_made_here
        ttft_s = times.first_token_s - times.arrived_s if times.first_token_s is not None else None
        if ttft_s is not None and times.first_token_s is not None and times.last_token_s is not None:
            self._observe_ttft(generation, ttft_s)
            per_choice = tokens / generation.num_choices
            if per_choice > 1:
                tpot_s = (times.last_token_s - times.first_token_s) / (per_choice - 1)
                self._metrics.observe(catalog.TPOT, tpot_s, self._model)
                self._judge("tpot", tpot_s, self._slo.tpot_s)
        self._metrics.observe(catalog.REQUEST_LATENCY, total_s, self._model)
        self._metrics.observe(catalog.PROMPT_TOKENS, generation.num_prompt_tokens, self._model)
        self._metrics.observe(catalog.OUTPUT_TOKENS, tokens, self._model)
        log.info(
            "id=%s route=%s outcome=%s prompt=%d cached=%d output=%d ttft_ms=%s total_ms=%.1f",
            request_id, route, outcome, generation.num_prompt_tokens, generation.num_cached_tokens, tokens,
            "-" if ttft_s is None else f"{1e3 * ttft_s:.1f}", 1e3 * total_s,
        )  # fmt: skip

    def _judge(self, objective: str, seconds: float, target_s: float | None) -> None:
        if target_s is not None:
            self._metrics.inc(catalog.SLO_REQUESTS, self._model, objective, str(seconds <= target_s).lower())

    def _observe_ttft(self, generation: Generation, ttft_s: float) -> None:
        times = generation.times
        self._metrics.observe(catalog.TTFT, ttft_s, self._model)
        self._judge("ttft", ttft_s, self._slo.ttft_s)
        parts = {"tokenize": times.tokenized_s - times.arrived_s}
        if times.engine is not None:
            parts |= {"queue": times.engine.queue_s, "prefill": times.engine.prefill_s}
        parts["first_token"] = max(0.0, ttft_s - sum(parts.values()))
        for part, seconds in parts.items():
            self._metrics.observe(catalog.TTFT_PART, seconds, self._model, part)
