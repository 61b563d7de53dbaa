"""Charge of one request: at its end, and of a long stream every second, so that a gateway that dies at any
moment has charged for all but the last."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import msgspec

from penstock.api.relay import StreamRecord
from penstock.gateway.proxy.routed_request import RoutedRequest
from penstock.gateway.records.token_usage import TokenUsage
from penstock.http.clock import Timer, TimerClock
from penstock.tenancy.prices import FREE, NANOS, Price
from penstock.tenancy.usage import Recorder, Usage

_EVERY_S = 0.9
_NOTHING = TokenUsage(0, 0)

Charged = Callable[[int], None]


class RequestCharge(msgspec.Struct, eq=False):
    _ledger: Recorder  # who is told, if the request has nobody of its own for that
    _prices: Mapping[str, Price]
    _routed: RoutedRequest
    _clock: TimerClock
    _charged: TokenUsage = _NOTHING
    _num_parts: int = 0
    _timer: Timer | None = None

    def follow(self, record: StreamRecord, model: str, charged: Charged | None, name: str = "") -> None:
        """From now on the stream is charged as it goes; `charged` is told how many tokens that are so far. `name`: in
        the books; empty: the pool's. An adapter has the price of its pool."""
        self.stop()
        self._timer = self._clock.call_later(_EVERY_S, self._look, record, model, charged, name)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self, model: str, usage: TokenUsage, name: str = "") -> None:
        if self._timer is not None:
            self.stop()
        self._charge(model, usage, self._routed.id, name, requests=1)

    def cost(self, model: str) -> float | None:
        """Cost of all that was charged, at this model's price; None: it has none."""
        price = self._price(model)
        return self._charged.nanos(price) / NANOS if not price.is_free else None

    def _price(self, model: str) -> Price:
        price = self._prices.get(model, FREE)
        return price if price is FREE or not self._routed.is_batch else price.of_batches

    def _look(self, record: StreamRecord, model: str, charged: Charged | None, name: str) -> None:
        self.follow(record, model, charged, name)
        prompt_tokens = record.prompt_tokens
        if prompt_tokens is None:
            return
        usage = TokenUsage(prompt_tokens, *record.counts)
        if usage.total > self._charged.total:
            self._num_parts += 1
            self._charge(model, usage, f"{self._routed.id}/{self._num_parts}", name, requests=0)
            if charged is not None:
                charged(usage.total)

    def _charge(self, model: str, usage: TokenUsage, id: str, name: str, requests: int) -> None:
        before, self._charged = self._charged, usage
        caller = self._routed.caller
        price = self._price(model)
        input_tokens, output_tokens, cached_tokens = usage.input_tokens, usage.output_tokens, usage.cached_tokens
        work = usage.work
        cost = usage.nanos(price) if not price.is_free else 0
        if before is not _NOTHING:
            cost -= before.nanos(price) if not price.is_free else 0
            input_tokens = max(0, input_tokens - before.input_tokens)
            output_tokens = max(0, output_tokens - before.output_tokens)
            cached_tokens = max(0, cached_tokens - before.cached_tokens)
        (self._routed.ledger or self._ledger).record(
            Usage(
                id,
                caller.tenant.id,
                caller.key_id,
                name or model,
                time.time(),
                input_tokens,
                cached_tokens,
                output_tokens,
                cost,
                requests,
                round(1e6 * work.device_s) if work is not None else 0,
                round(1e3 * work.kv_block_s) if work is not None else 0,
            )
        )
