"""One client's request over HTTP: what its journey says is done here, and what happens to it is told to its journey.

Everything here is called back from the event loop and returns at once. When the journey ends, `_settle` runs, once: the
reservation is settled, the admission's entry closed, the usage recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from random import Random
from typing import Any
from zlib import crc32

from msgspec.structs import replace

from penstock.admission.admission import Admission
from penstock.admission.decision import Admit, Decision, Queued
from penstock.api import server_timing
from penstock.api.sse import error_event
from penstock.core.errors import EngineFailed, PenstockError
from penstock.gateway.proxy import journey as on
from penstock.gateway.proxy import refusals
from penstock.gateway.proxy.admission_queue import AdmissionQueue
from penstock.gateway.proxy.answer_headers import AnswerHeaders
from penstock.gateway.proxy.fallback import Chain, failure_of_answer, failure_of_shed
from penstock.gateway.proxy.journey import Actions, Charge, Journey, Leg, Role, State
from penstock.gateway.proxy.rate_limit import RateLimitReservation
from penstock.gateway.proxy.replica_attempt import ReplicaAttempt, is_lost, is_replicas_fault
from penstock.gateway.proxy.routed_request import RoutedRequest
from penstock.gateway.proxy.shadow import Shadows
from penstock.gateway.proxy.stranded import StrandedStreams
from penstock.gateway.proxy.transcript import Transcript
from penstock.gateway.records.accounting import AccountingServices, RequestAccounting
from penstock.gateway.records.facts import Ending
from penstock.gateway.records.recorder import GatewayRecorder
from penstock.gateway.records.token_usage import TokenUsage
from penstock.gateway.replicas.replica_set import ReplicaSet
from penstock.gateway.replicas.snapshots import Snapshots
from penstock.gateway.tenant_services import TenantServices
from penstock.gateway.tokens.pools import Pools
from penstock.gateway.tokens.request_size import Size
from penstock.health.quarantine import Quarantine
from penstock.health.retries import RetryBudget
from penstock.http.clock import TimerClock
from penstock.http.exchange import Sink
from penstock.http.forward import End, Forwarding, Outcome, forward
from penstock.http.message import ResponseHead
from penstock.router.request import EdgeRequest
from penstock.router.router import Choice
from penstock.tenancy.limits.quota import Quota


@dataclass(frozen=True)
class ProxyServices:
    """Objects of a gateway that its requests share."""

    clock: TimerClock
    random: Random
    admission: Admission
    queue: AdmissionQueue
    replicas: ReplicaSet
    pools: Pools
    snapshots: Snapshots
    tenants: TenantServices
    accounting: AccountingServices
    recorder: GatewayRecorder
    headers: AnswerHeaders
    stranded: StrandedStreams
    shadows: Shadows
    retries: RetryBudget
    quarantine: Quarantine


class ProxiedRequest:
    __slots__ = (
        "_account",
        "_attempt",
        "_chain",
        "_choice",
        "_doubted",
        "_forwarding",
        "_journey",
        "_outcome",
        "_reservation",
        "_routed",
        "_services",
        "_sink",
        "_size",
        "_tokens_before",
        "_transcript",
        "is_stream",
        "request",
    )

    def __init__(
        self,
        services: ProxyServices,
        routed: RoutedRequest,
        request: EdgeRequest,
        size: Size,
        body: bytes,
        quota: Quota | None,
        chain: Chain | None,
    ) -> None:
        """`body`: as its replicas are sent it; `chain`: of models, where its route has fallbacks."""
        self.request = request
        self.is_stream = bool(routed.view.stream)
        self._services = services
        self._routed = routed
        self._sink: Sink = routed.exchange
        self._size = size
        self._transcript = Transcript(body, size, is_stream=self.is_stream)
        self._chain = chain
        self._reservation = None
        if quota is not None:
            tenant = routed.caller.tenant.id
            fingerprint = crc32(routed.body) | 1  # as at its entry: what it comes back with after a refusal
            self._reservation = RateLimitReservation(
                services.tenants.limiter, services.clock, quota, tenant, size, fingerprint, self._reserved
            )
        self._account = RequestAccounting(services.accounting, routed, self._reservation)
        self._journey = Journey(services.retries, has_fallbacks=chain is not None)
        self._choice: Choice | None = None  # of its replica, and why
        self._attempt: ReplicaAttempt | None = None  # at a replica
        self._tokens_before = 0  # that others had made when it was sent there
        self._forwarding: Forwarding | None = None
        self._outcome: Outcome | None = None  # of the last attempt, where there was an answer
        self._doubted: list[ReplicaAttempt] = []  # at replicas that answered with an error, perhaps by its own fault

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
        self.decided(self._services.admission.submit(self.request, self._services.clock.now()))

    def decided(self, decision: Decision) -> None:
        if isinstance(decision, Admit):
            self._choice = decision.choice
            self._account.chose(self.request, decision.choice)
            self._run(self._journey.admitted(Leg(Role.WHOLE, decision.replica_id)))
        elif isinstance(decision, Queued):
            self._services.queue.add(self)
        else:
            error = refusals.shed(decision, self._size)
            self._run(self._journey.shed(failure_of_shed(decision.reason), error))

    # -- to a replica and back

    def _send(self, action: on.Send) -> None:
        services, transcript = self._services, self._transcript
        try:
            replica = services.replicas[action.legs[0].replica]
        except KeyError:  # it was removed before the next try
            self._run(self._failed(has_lost=False))
            return
        tenant, target = self._routed.caller.tenant, self._routed.surface.path
        letter = transcript.rest_letter(replica) if action.is_rest else transcript.letter(replica)
        if letter is None:
            self._run(self._journey.refused(EngineFailed("nobody can know what is left of the answer")))
            return
        relayed, body = letter
        try:
            way = replica.way(tenant, target, body, self.request.adapter)
        except PenstockError as error:  # such a server must not be sent it, which says nothing about the replica
            self._run(self._journey.refused(error))
            return
        now = services.clock.now()
        # Failures have a source, for the breaker: the tenant; before there are tenants, the request itself.
        source = tenant.id if services.tenants.keys.has_had_tenants else str(self.request.fingerprint)
        self._attempt = ReplicaAttempt(replica, self, now, source)
        trace = self._account.timeline.sent(replica.id, now)
        self._tokens_before = transcript.num_tokens if action.is_rest else 0
        if action.is_rest:
            services.recorder.carried_on(self.request.model)
        elif transcript.record is not None:
            self._account.follow(transcript.record, self.request)
        self._forwarding = forward(
            self._sink,
            way,
            target=target,
            headers=replica.headers_for(tenant, relayed=relayed) + trace,
            body=body,
            done=self._done,
            extra_headers=self._headers(),
            wanted=self._wanted,
            started=self._journey.bytes_came,
            tap=transcript.tap,
            is_whole=transcript.is_whole,
        )

    def _wanted(self, head: ResponseHead) -> bool:
        is_held_back = self._chain is not None and self._chain.holds_back(head.status)
        if not self._journey.head(head.status, is_held_back=is_held_back):
            return False
        services = self._services
        now = services.clock.now()
        self._transcript.answered(head)
        if self._doubted:
            doubted, self._doubted = self._doubted, []
            for attempt in doubted:
                if attempt.prove(now):
                    services.replicas.changed(attempt.replica)
        self._account.timeline.answered(now, head.headers.get(server_timing.HEADER, b""))
        services.admission.started(self.request.id, now)
        return True

    def _done(self, outcome: Outcome) -> None:
        self._forwarding, self._outcome, end = None, outcome, outcome.end
        if end is End.COMPLETED:
            self._leave_replica(is_blamed=False)
            self._run(self._journey.completed(outcome.status or 0))
            return
        relays = self._attempt is not None and self._attempt.replica.relays
        self._leave_replica(is_replicas_fault(outcome), is_doubtful=end is End.DECLINED)
        if end is End.CLIENT_GONE:
            has_all = self._routed.surface.last_event in outcome.tail  # many do not wait for the end in form
            self._run(self._journey.client_gone(has_all=has_all))
        elif end is End.DECLINED:
            status, failure = outcome.status or 0, None
            if self._chain is not None:
                failure = failure_of_answer(status, outcome.tail)
            is_lost_with = is_lost(outcome, relays=relays)
            self._run(self._journey.declined(status, failure, is_lost=is_lost_with, **self._progress()))
        else:
            self._run(self._failed(has_lost=is_lost(outcome, relays=relays)))

    def _failed(self, *, has_lost: bool) -> Actions:
        self._outcome = None
        return self._journey.failed(is_lost=has_lost, **self._progress())

    def _progress(self) -> dict[str, Any]:
        made = self._transcript.num_tokens - self._tokens_before
        return {"num_tokens": made, "is_resumable": self._transcript.record is not None}

    def id_to_move(self) -> str | None:
        record, journey, services = self._transcript.record, self._journey, self._services
        if record is None or not (journey.is_begun and journey.tries.may_move):
            return None
        now = services.clock.now()
        return record.stream_id if services.admission.has_other(self.request.id, now, self._avoided()) else None

    def replica_lost(self) -> None:
        """Its replica hangs, or is gone without its connection saying so."""
        if self._stop_forwarding(is_blamed=True):
            self._run(self._journey.replica_lost(**self._progress()))

    def _stop_forwarding(self, is_blamed: bool | None) -> bool:
        if self._forwarding is None:
            return False
        self._forwarding.cancel()
        self._forwarding = None
        self._sink.watcher = self
        self._leave_replica(is_blamed)
        return True

    def _leave_replica(self, is_blamed: bool | None, *, is_doubtful: bool = False) -> None:
        attempt, self._attempt, now = self._attempt, None, self._services.clock.now()
        if (trace := self._account.timeline.trace) is not None:
            trace.left(now, has_failed=bool(is_blamed))
        if attempt is None:
            return
        if attempt.end(is_blamed, now, is_doubtful=is_doubtful):
            self._services.replicas.changed(attempt.replica)
        if is_blamed and is_doubtful:
            self._doubted.append(attempt)

    # -- to another replica

    def _pick(self, _: on.Pick) -> None:
        services, losses, avoid = self._services, self._journey.tries.losses, self._avoided()
        choice = None
        if losses.replicas:
            usable = services.pools[self.request.model].ready_replicas - avoid
            if apart := losses.apart(usable):
                choice = self._reroute(avoid | apart)
        choice = choice or self._reroute(avoid)
        if choice is None or choice.replica is None:
            self._run(self._journey.picked(None))
        else:
            self._choice = choice
            self._account.chose(self.request, choice)
            self._run(self._journey.picked(Leg(Role.WHOLE, choice.replica.id)))

    def _avoided(self) -> frozenset[str]:
        """Replicas that it must not go to next."""
        replicas, tries = self._services.replicas, self._journey.tries
        avoid = frozenset(tries.replicas)
        if self._journey.is_begun:  # only a penstock replica carries on what another began
            avoid |= {replica.id for replica in replicas.values() if not replica.relays}
        return avoid | tries.losses.forbidden(replicas) if tries.losses.replicas else avoid

    def _reroute(self, avoid: frozenset[str]) -> Choice | None:
        request, is_begun = self.request, self._journey.is_begun
        known_tokens, now = request.kv_tokens if is_begun else request.prompt_tokens, self._services.clock.now()
        return self._services.admission.reroute(request.id, now, avoid, known_tokens, is_begun=is_begun)

    def _send_later(self, action: on.SendLater) -> None:
        services = self._services
        services.recorder.retried(self.request.model)
        self._sink.watcher = self
        services.clock.call_later(action.max_s * services.random.random(), self._backed_off, action.legs)

    def _backed_off(self, legs: tuple[Leg, ...]) -> None:
        self._run(self._journey.backed_off(legs))

    def _strand(self, _: on.Strand) -> None:
        self._sink.watcher = self
        self._services.stranded.add(self, self._services.replicas)

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
        move = self._chain.move(action.failure, self.request)
        if move is None:
            self._run(self._journey.has_no_fallback())
            return
        self._stop_forwarding(is_blamed=None)
        self._account.start_over(self.request.id, self.request.prompt_tokens)
        self._services.recorder.fell_back(self.request.model, move.request.model, action.failure.value)
        self.request, self._size, body = move
        self._transcript, self._outcome = Transcript(body, self._size, is_stream=self.is_stream), None
        self._run(self._journey.fell_back())

    # -- the client

    def client_gone(self) -> None:
        """It left while nothing was forwarded: waiting for the limiter, for a place, or for another replica."""
        self._outcome = None
        self._services.stranded.discard(self)
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
        self._services.recorder.refused(action.error)

    def _break_off(self, action: on.BreakOff) -> None:
        event = error_event(action.error, self.request.id, self._routed.surface.convention)
        self._sink.write(event, is_last=True)

    def _pass_on(self, _: on.PassOn) -> None:
        """Every replica said no: the client gets the last one's answer."""
        outcome = self._outcome
        assert outcome is not None
        assert outcome.status is not None
        headers, body = outcome.headers + self._headers(), outcome.tail
        self._sink.start(outcome.status, headers, length=len(body), data=body, is_last=True)

    def _quarantine(self, _: on.Quarantine) -> None:
        self._outcome = None
        services, routed, losses = self._services, self._routed, self._journey.tries.losses
        tenant, now = routed.caller.tenant.id, services.clock.now()
        fingerprint = services.quarantine.add(tenant, routed.surface.path, routed.body, now)
        services.recorder.quarantined(self.request.model, tenant, fingerprint, losses.replicas)
        self._account.timeline.quarantined(fingerprint)

    def _settle(self, end: on.Settle) -> None:
        self._sink.watcher = None
        if self._chain is not None:
            self._chain.close()
        usage = self._used_by_whole() if end.charge is Charge.WHOLE else self._used(end.charge)
        self._account.close(self.request, usage, end.ending, end.reason)
        if end.ending is Ending.OK:
            self._services.shadows.mirror(self._routed, self.request.model, self._size.output)

    def _used(self, charge: Charge) -> TokenUsage | None:
        transcript = self._transcript
        match charge:
            case Charge.SEEN:
                return transcript.usage(self._outcome) or transcript.guess()
            case Charge.PART:
                return transcript.usage(None) or transcript.guess_part()
            case Charge.REQUEST if self._reservation is not None:
                self._reservation.settle(0)
        return None

    def _used_by_whole(self) -> TokenUsage:
        outcome, services, replica_id = self._outcome, self._services, self._journey.legs[0].replica
        assert outcome is not None
        usage = self._transcript.usage(outcome)
        if usage is None:
            services.recorder.usage_missing(self.request.model, replica_id)
            return self._transcript.guess_whole()
        if self.is_stream and (replica := services.replicas.get(replica_id)) is not None:
            services.snapshots.answered(replica, usage, outcome)
        return usage


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
