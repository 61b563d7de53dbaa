"""One client's request over HTTP: what its journey says is done here, and what happens to it is told to its journey.

Everything here is called back from the event loop and returns at once. The replicas' side is an `UpstreamRequest`. When
the journey ends, `_settle` runs, once: the reservation is settled, the admission's entry closed, the usage recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from msgspec.structs import replace

from penstock.admission.decision import Admit, Decision
from penstock.api.sse import error_event
from penstock.core.errors import PenstockError
from penstock.gateway.proxy import journey as on
from penstock.gateway.proxy import refusals
from penstock.gateway.proxy.admission_queue import AdmissionQueue
from penstock.gateway.proxy.answer_headers import AnswerHeaders
from penstock.gateway.proxy.failover import Failover
from penstock.gateway.proxy.holding import HeldRequest, HoldingServices
from penstock.gateway.proxy.journey import Actions, Charge, Journey, Leg, State
from penstock.gateway.proxy.journey_shell import JourneyShell, SizedRequest, leg_of
from penstock.gateway.proxy.rate_limit import RateLimitReservation
from penstock.gateway.proxy.shadow import Shadows
from penstock.gateway.proxy.upstream_request import UpstreamRequest, UpstreamServices
from penstock.gateway.records.accounting import AccountingServices, RequestAccounting
from penstock.gateway.records.facts import Ending
from penstock.health.quarantine import Quarantine
from penstock.http.clock import TimerClock
from penstock.http.exchange import Sink
from penstock.tenancy.limits.limiter import Limiter


@dataclass(frozen=True)
class ProxyServices:
    """Objects of a gateway that its requests share, in the order in which a request meets them."""

    clock: TimerClock
    limiter: Limiter
    queue: AdmissionQueue
    holding: HoldingServices
    headers: AnswerHeaders
    upstream: UpstreamServices
    failover: Failover
    quarantine: Quarantine
    accounting: AccountingServices
    shadows: Shadows


class ProxiedRequest(JourneyShell):
    __slots__ = ("_held", "_reservation", "_services", "_sink", "_upstream")

    def __init__(self, services: ProxyServices, sized: SizedRequest) -> None:
        routed, size, quota, chain = sized.routed, sized.size, sized.quota, sized.chain
        self._services = services
        self._sink: Sink = routed.exchange
        self._held: HeldRequest | None = None  # while it waits for want of a replica
        self._reservation = None
        if quota is not None:
            tenant = routed.caller.tenant.id
            fingerprint = crc32(routed.body) | 1  # as at its entry: what it comes back with after a refusal
            self._reservation = RateLimitReservation(
                services.limiter, services.clock, quota, tenant, size, fingerprint, self._reserved
            )
        account = RequestAccounting(services.accounting, routed, self._reservation)
        journey = Journey(services.failover.retries, has_fallbacks=chain is not None)
        super().__init__(sized, journey, account)
        self._upstream = UpstreamRequest(
            services.upstream, routed, size, sized.body, chain, journey, account, self._run
        )

    def begin(self) -> None:
        self._sink.watcher = self
        if self._routed.entry is not None:
            self._routed.entry.settle(None)
        self._run(self._journey.begin(has_limits=self._reservation is not None))

    def _run(self, actions: Actions) -> None:
        for action in actions:
            _RUN[type(action)](self, action)

    # -- in

    def _reserve(self, _: on.Reserve) -> None:
        assert self._reservation is not None
        self._reservation.pay()

    def _reserved(self, error: PenstockError | None) -> None:
        if error is not None:
            self._run(self._journey.refused(error))
            return
        if (size := self._size).exact is not None:
            self.request = replace(self.request, prompt_tokens=size.prompt, context_tokens=size.context_tokens)
        self._run(self._journey.reserved())

    def _submit(self, _: on.Submit) -> None:
        if self._chain is not None:
            self._chain.watch(self._too_slow)
        self._services.queue.submit(self)

    def held(self) -> None:
        self._held = HeldRequest(
            self._services.holding, self._routed, self.request.model, self._sink, headers=self._headers
        )

    def _end_hold(self, *, is_admitted: bool) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.end(is_admitted=is_admitted)
            self._sink = self._upstream.sink = held.sink

    def decided(self, decision: Decision) -> None:
        if self._held is not None:
            self._end_hold(is_admitted=isinstance(decision, Admit))
        super().decided(decision)

    def _send(self, action: on.Send) -> None:
        self._upstream.send(action, self.request, self._headers())

    # -- to another replica

    def _pick(self, _: on.Pick) -> None:
        choice = self._services.failover.pick(self.request, self._journey)
        if choice is None or choice.replica is None:
            self._run(self._journey.picked(None))
        else:
            self._choice = choice
            self._account.chose(self.request, choice)
            self._run(self._journey.picked(leg_of(choice)))

    def _send_later(self, action: on.SendLater) -> None:
        self._sink.watcher = self
        self._account.retried(self.request.model)
        self._services.failover.back_off(action, self._backed_off)

    def _backed_off(self, legs: tuple[Leg, ...]) -> None:
        self._run(self._journey.backed_off(legs))

    def _strand(self, _: on.Strand) -> None:
        self._sink.watcher = self
        self._services.failover.stranded.add(self)

    def forget_tries(self, lost: Set[str]) -> None:
        self._journey.tries.replicas -= lost

    def replica_back(self) -> bool:
        self._run(self._journey.replica_back())
        return self._journey.state is not State.STRANDED

    def waited_enough(self) -> None:
        self._run(self._journey.waited_enough())

    # -- to another model

    def _too_slow(self) -> None:
        self._run(self._journey.too_slow())

    def _fall_back(self, action: on.FallBack) -> None:
        """On to the next model of the chain, if there is one, as if that had been asked for. What is reserved stays."""
        assert self._chain is not None
        if self._held is not None:
            self._end_hold(is_admitted=False)
        move = self._chain.move(action.failure, self.request)
        if move is None:
            self._run(self._journey.has_no_fallback())
            return
        self._upstream.start_over(move.size, move.body)
        self._account.start_over(self.request, move.request.model, action.failure.value)
        self.request, self._size = move.request, move.size
        self._sink.watcher = self
        self._run(self._journey.fell_back())

    # -- the client

    def client_gone(self) -> None:
        """It left while nothing was forwarded: waiting for the limiter, for a place, or for another replica."""
        self._upstream.outcome = None
        self._services.failover.stranded.discard(self)
        self._run(self._journey.client_gone())

    def pause(self) -> None:
        """Nothing is being written."""

    resume = pause

    # -- out

    def _headers(self) -> bytes:
        headers = self._services.headers.of(self.request.id, self._choice, self._routed.caller.tenant)
        if self._routed.ruling is not None:
            headers += self._routed.ruling.header
        return headers if self._chain is None else headers + self._chain.header

    def _refuse(self, action: on.Refuse) -> None:
        refusals.respond(self._sink, self._routed.surface.convention, action.error, self.request.id)
        self._account.refused(action.error)

    def _break_off(self, action: on.BreakOff) -> None:
        if not self._sink.is_started:  # its client was to get it as a whole
            refusals.respond(self._sink, self._routed.surface.convention, action.error, self.request.id)
            return
        event = error_event(action.error, self.request.id, self._routed.surface.convention)
        self._sink.write(event, is_last=True)

    def _pass_on(self, _: on.PassOn) -> None:
        """Every replica said no: the client gets the last one's answer."""
        outcome = self._upstream.outcome
        assert outcome is not None
        assert outcome.status is not None
        headers, body = outcome.headers + self._headers(), outcome.tail
        self._sink.start(outcome.status, headers, length=len(body), data=body, is_last=True)

    def _quarantine(self, _: on.Quarantine) -> None:
        self._upstream.outcome = None
        services, routed, tenant = self._services, self._routed, self.request.tenant
        fingerprint = services.quarantine.add(tenant, routed.surface.path, routed.body, services.clock.now())
        self._account.quarantined(self.request, fingerprint, self._journey.tries.losses.replicas)

    def _settle(self, end: on.Settle) -> None:
        if self._held is not None:
            self._end_hold(is_admitted=False)
        self._sink.watcher = None
        if self._chain is not None:
            self._chain.close()
        if end.charge is Charge.REQUEST and self._reservation is not None:
            self._reservation.settle(0)
        self._account.close(self.request, self._upstream.settle(end.charge), end.ending, end.reason)
        if end.ending is Ending.OK and self._routed.surface.is_metered:
            self._services.shadows.mirror(self._routed, self.request.version, self._size.output)
        if self._routed.observed is not None:
            self._routed.observed.close(self._routed)


_RUN: dict[type[on.Action], Callable[[ProxiedRequest, Any], None]] = {
    on.Reserve: ProxiedRequest._reserve,
    on.Submit: ProxiedRequest._submit,
    on.Pick: ProxiedRequest._pick,
    on.Send: ProxiedRequest._send,
    on.SendLater: ProxiedRequest._send_later,
    on.Strand: ProxiedRequest._strand,
    on.FallBack: ProxiedRequest._fall_back,
    on.Quarantine: ProxiedRequest._quarantine,
    on.Refuse: ProxiedRequest._refuse,
    on.PassOn: ProxiedRequest._pass_on,
    on.BreakOff: ProxiedRequest._break_off,
    on.Settle: ProxiedRequest._settle,
}
