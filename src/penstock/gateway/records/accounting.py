"""Everything that is kept on one request, from its toll to its last line in the log; closed once, whatever the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.admission.admission import Used
from penstock.api.relay import StreamRecord
from penstock.gateway.proxy.rate_limit import RateLimitReservation
from penstock.gateway.proxy.routed_request import RoutedRequest
from penstock.gateway.records.charge import RequestCharge
from penstock.gateway.records.facts import Ending
from penstock.gateway.records.timeline import RequestTimeline
from penstock.gateway.records.token_usage import TokenUsage
from penstock.router.request import EdgeRequest
from penstock.router.router import Choice

if TYPE_CHECKING:
    from penstock.gateway.app import Gateway


class RequestAccounting:
    __slots__ = ("_charge", "_gateway", "_reservation", "_routed", "timeline")

    def __init__(self, gateway: Gateway, routed: RoutedRequest, reservation: RateLimitReservation | None) -> None:
        """`reservation`: of a tenant with limits."""
        self._gateway = gateway
        self._routed = routed
        self._reservation = reservation
        self._charge = RequestCharge(gateway.services.ledger, gateway.prices, routed, gateway.clock)
        now = gateway.now()
        self.timeline = RequestTimeline(now, gateway.recorder.traces.begin(routed.exchange.request.headers, now))

    def chose(self, request: EdgeRequest, choice: Choice) -> None:
        """A replica, for the request that is sent there now."""
        now = self._gateway.now()
        self.timeline.chose(choice, now)
        self._gateway.recorder.chose(self._routed, request, choice, now)

    def follow(self, record: StreamRecord, request: EdgeRequest) -> None:
        """A stream begins, which is charged as it goes."""
        progress = self._reservation.progress if self._reservation is not None else None
        self._charge.follow(record, request.model, progress, request.adapter)

    def start_over(self, request_id: str, prompt_tokens: int) -> None:
        """The request leaves this model for another. What it has reserved stays."""
        self._gateway.finished(request_id, Used(prompt_tokens, 0))
        self._charge.stop()
        self.timeline.starts_over()

    def close(self, request: EdgeRequest, usage: TokenUsage | None, ending: Ending, reason: str) -> None:
        """`usage`: None if nobody worked for it."""
        gateway, routed, model = self._gateway, self._routed, request.model
        if usage is not None:
            usage = self._measured(model, usage, ending)
            self._charge.close(model, usage, request.adapter)
            if routed.surface.generates:
                gateway.lengths.learn(request.tenant, model, usage.output_tokens)
        else:
            self._charge.stop()
        if self._reservation is not None:
            self._reservation.settle(usage.total if usage is not None else None)
        gateway.finished(request.id, Used(usage.input_tokens, usage.output_tokens) if usage is not None else None)
        gateway.recorder.asked(routed)
        cost = self._charge.cost(model) if usage is not None else None
        gateway.recorder.ended(self.timeline.facts(routed, model, usage, ending, reason, gateway.now(), cost))
        if routed.ruling is not None:
            gateway.recorder.rules.ended(routed.ruling, model, usage, gateway.prices, gateway.device_time)

    def _measured(self, model: str, usage: TokenUsage, ending: Ending) -> TokenUsage:
        """A replica says at an answer's end what it took; of a client that left before, it is estimated."""
        if usage.work is not None:
            self._gateway.device_time.learn(model, usage, usage.work)
        elif ending is Ending.CLIENT_GONE:
            return usage._replace(work=self._gateway.device_time.estimate(model, usage))
        return usage
