"""Everything that is kept on one request, from its reservation to its last line in the log; closed once, at its end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from penstock.admission.admission import Used
from penstock.api.relay import StreamRecord
from penstock.core.errors import PenstockError
from penstock.gateway.proxy.admission_queue import AdmissionQueue
from penstock.gateway.proxy.rate_limit import RateLimitReservation
from penstock.gateway.proxy.routed_request import RoutedRequest
from penstock.gateway.records.charge import RequestCharge
from penstock.gateway.records.device_time import DeviceTime
from penstock.gateway.records.facts import Ending
from penstock.gateway.records.recorder import GatewayRecorder
from penstock.gateway.records.timeline import RequestTimeline
from penstock.gateway.records.token_usage import TokenUsage
from penstock.http.clock import TimerClock
from penstock.router.learning import OutputLengths
from penstock.router.request import EdgeRequest
from penstock.router.router import Choice
from penstock.tenancy.prices import Price
from penstock.tenancy.usage import Recorder


@dataclass(frozen=True)
class AccountingServices:
    """Where the accountings of all requests are written."""

    clock: TimerClock
    queue: AdmissionQueue
    recorder: GatewayRecorder
    ledger: Recorder
    prices: Mapping[str, Price]  # by pool
    lengths: OutputLengths = field(default_factory=OutputLengths)
    device_time: DeviceTime = field(default_factory=DeviceTime)


class RequestAccounting:
    __slots__ = ("_charge", "_reservation", "_routed", "_services", "timeline")

    def __init__(
        self, services: AccountingServices, routed: RoutedRequest, reservation: RateLimitReservation | None
    ) -> None:
        """`reservation`: of a tenant with limits."""
        self._services = services
        self._routed = routed
        self._reservation = reservation
        self._charge = RequestCharge(services.ledger, services.prices, routed, services.clock)
        now = services.clock.now()
        headers, is_own = routed.exchange.request.headers, bool(routed.caller.step_of)
        self.timeline = RequestTimeline(now, services.recorder.traces.begin(headers, now, is_own=is_own))

    def chose(self, request: EdgeRequest, choice: Choice) -> None:
        """A replica, for the request that is sent there now."""
        now = self._services.clock.now()
        if self.timeline.trace is not None:
            self.timeline.trace.chose(choice, now)
        if self._routed.observed is not None:
            self._routed.observed.chose(request.version, choice)
        self._services.recorder.chose(self._routed, request, choice, now)

    def follow(self, record: StreamRecord, request: EdgeRequest) -> None:
        """A stream begins, which is charged as it goes."""
        progress = self._reservation.progress if self._reservation is not None else None
        self._charge.follow(record, request.model, progress, _name_in_books(request))

    def retried(self, model: str) -> None:
        self._services.recorder.retried(model)

    def start_over(self, request: EdgeRequest, model: str, reason: str) -> None:
        """The request leaves its model for another. What it has reserved stays."""
        self._services.queue.finished(request.id, Used(request.prompt_tokens, 0))
        self._charge.stop()
        self.timeline.starts_over()
        self._services.recorder.fell_back(request.model, model, reason)

    def refused(self, error: PenstockError) -> None:
        self._services.recorder.refused(error)

    def quarantined(self, request: EdgeRequest, fingerprint: str, lost: Iterable[str]) -> None:
        """`lost`: the replicas that were lost with it."""
        self._services.recorder.quarantined(request.model, request.tenant, fingerprint, lost)
        self.timeline.quarantined(fingerprint)

    def close(self, request: EdgeRequest, usage: TokenUsage | None, ending: Ending, reason: str) -> None:
        """`usage`: None if nobody worked for it."""
        services, routed, model = self._services, self._routed, request.model
        if usage is not None:
            if usage.work is not None:
                services.device_time.learn(model, usage, usage.work)
            elif ending is Ending.CLIENT_GONE:  # else its replica would have said at the end what it took
                usage = replace(usage, work=services.device_time.estimate(model, usage))
            self._charge.close(model, usage, _name_in_books(request))
            if routed.surface.generates:
                services.lengths.learn(request.tenant, model, usage.output_tokens)
        else:
            self._charge.stop()
        if self._reservation is not None:
            self._reservation.settle(usage.total if usage is not None else None)
        services.queue.finished(
            request.id, Used(usage.input_tokens, usage.output_tokens) if usage is not None else None
        )
        services.recorder.asked(routed)
        cost = self._charge.cost(model) if usage is not None else None
        now = services.clock.now()
        facts = self.timeline.facts(routed, model, usage, ending, reason, now, cost, request.version)
        services.recorder.ended(facts)
        if routed.observed is not None:
            routed.observed.ended(facts)
        if routed.ruling is not None:
            services.recorder.rules.ended(routed.ruling, model, usage, services.prices, services.device_time)


def _name_in_books(request: EdgeRequest) -> str:
    """An adapter's own, if it was asked for by that, or the version's."""
    return request.adapter if request.version in ("", request.model) and request.adapter else request.version
