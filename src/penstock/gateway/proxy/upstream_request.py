"""The replica's side of one client's request: what a replica is sent, its answer, and what that says about the replica.

Each attempt counts at its replica as long as it lasts, and is told to the replica's circuit breaker at its end. An
error that a replica answers with may be the request's own fault: it stays in doubt until the same request does well
elsewhere. Whatever happens is told to the journey, whose actions are run by its shell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from secrets import randbits
from typing import Any, NamedTuple

from penstock.admission.admission import Admission
from penstock.api import server_timing
from penstock.core.errors import EngineFailed, PenstockError
from penstock.dialects.handover import ROOM_BITS, can_be_split
from penstock.gateway.proxy import two_legs
from penstock.gateway.proxy.failover import Failover
from penstock.gateway.proxy.fallback import Chain, failure_of_answer
from penstock.gateway.proxy.journey import Actions, Charge, Journey, Leg, Send
from penstock.gateway.proxy.replica_attempt import ReplicaAttempt, is_lost, is_replicas_fault
from penstock.gateway.proxy.routed_request import RoutedRequest
from penstock.gateway.proxy.transcript import Transcript
from penstock.gateway.proxy.whole_answer import WholeAnswer
from penstock.gateway.records.accounting import RequestAccounting
from penstock.gateway.records.recorder import GatewayRecorder
from penstock.gateway.records.token_usage import NO_TOKENS, TokenUsage
from penstock.gateway.records.trace import Visit
from penstock.gateway.replicas.dialect_upstream import PreparedRequest
from penstock.gateway.replicas.replica import Replica, kv_source_header
from penstock.gateway.replicas.replica_set import ReplicaSet
from penstock.gateway.replicas.snapshots import Snapshots
from penstock.gateway.tokens.request_size import Size
from penstock.http.clock import TimerClock
from penstock.http.exchange import Sink
from penstock.http.forward import End, Forwarding, Outcome, forward
from penstock.http.message import ResponseHead
from penstock.http.upstream import Upstream
from penstock.router.request import EdgeRequest
from penstock.tenancy.keys import KeyRing

Run = Callable[[Actions], None]


def _run_nothing(_: Actions) -> None: ...


@dataclass(frozen=True)
class UpstreamServices:
    """Objects of a gateway that the replicas' side of its requests share."""

    clock: TimerClock
    admission: Admission
    replicas: ReplicaSet
    snapshots: Snapshots
    keys: KeyRing
    failover: Failover
    recorder: GatewayRecorder


class _Shared(NamedTuple):
    way: Upstream
    header: bytes


class _PrefillRecord(NamedTuple):
    """Facts of a prefill for another replica, for the records."""

    services: UpstreamServices
    model: str
    began: float
    visit: Visit | None

    def end(self, replica: Replica, outcome: two_legs.Outcome, said: str) -> None:
        now = self.services.clock.now()
        self.services.recorder.prefilled(self.model, replica.id, outcome, said, now - self.began)
        if self.visit is not None:
            self.visit.left_at, self.visit.outcome = self.visit.left_at or now, outcome
            self.visit.has_failed = outcome is not two_legs.Outcome.HANDED_OVER


class UpstreamRequest:
    """An `InFlightRequest` of the replica that has it. It lives as long as the client's, whatever replicas and models
    that goes to."""

    __slots__ = (
        "_account",
        "_attempt",
        "_chain",
        "_doubted",
        "_forwarding",
        "_journey",
        "_request",
        "_routed",
        "_run",
        "_services",
        "_tokens_before",
        "_transcript",
        "is_stream",
        "outcome",
        "sink",
    )

    def __init__(
        self,
        services: UpstreamServices,
        routed: RoutedRequest,
        size: Size,
        body: bytes,
        chain: Chain | None,
        journey: Journey,
        account: RequestAccounting,
        run: Run,
    ) -> None:
        """`body`: as replicas are sent it; `run`: the shell that runs the journey's actions."""
        self.is_stream = bool(routed.view.stream)
        self._services = services
        self._routed = routed
        self.sink: Sink = routed.exchange  # where answers are written
        self._chain = chain
        self._journey = journey
        self._account = account
        self._run = run
        self._transcript = Transcript(body, size, is_stream=self.is_stream)
        self._attempt: ReplicaAttempt | None = None  # at a replica
        self._tokens_before = 0  # that others had made when it was sent there
        self._forwarding: Forwarding | None = None
        self.outcome: Outcome | None = None  # of the last attempt, where there was an answer
        self._doubted: list[ReplicaAttempt] = []  # at replicas that answered with an error, perhaps by its own fault

    def start_over(self, size: Size, body: bytes) -> None:
        """The request goes to another model, as if that had been asked for."""
        self.stop(is_blamed=None)
        self._transcript, self.outcome = Transcript(body, size, is_stream=self.is_stream), None
        if self._routed.observed is not None:
            self._routed.observed.starts_over()

    def send(self, action: Send, request: EdgeRequest, answer_headers: bytes) -> None:
        """`answer_headers`: those that the gateway adds to the replica's."""
        services, transcript = self._services, self._transcript
        self._request = request
        replica = services.replicas.by_id.get(action.legs[0].replica)
        if replica is None:  # it was removed before the next try
            self._fail(has_lost=False)
            return
        tenant, target = self._routed.caller.tenant, self._routed.surface.path
        leg = action.legs[0]
        pulls = kv_source_header(leg.source) if replica.relays else b""
        letter = transcript.rest_letter(replica) if action.is_rest else transcript.letter(replica)
        if letter is None:
            self._run(self._journey.refused(EngineFailed("nobody can know what is left of the answer")))
            return
        relayed, body = letter
        if not self.is_stream and replica.relays and not isinstance(self.sink, WholeAnswer):
            self.sink = WholeAnswer(self.sink)
        try:
            way = replica.way(tenant, target, body, request.adapter)
            shared = self._shared(leg, replica, way, body) if replica.handover is not None else None
        except PenstockError as error:  # such a server must not be sent it, which says nothing about the replica
            self._run(self._journey.refused(error))
            return
        if shared is None and replica.snapshot.needs_peer:  # who was to compute its prompt was removed, or is none
            self._run(self._journey.source_failed(is_lost=False))
            return
        now, observed = services.clock.now(), self._routed.observed
        self._attempt = ReplicaAttempt(replica, self, now, self._source_of_failures())
        trace = self._account.timeline.sent(replica.id, now)
        self._tokens_before = transcript.num_tokens if action.is_rest else 0
        if action.is_rest:
            services.recorder.carried_on(request.model)
        elif transcript.record is not None:
            self._account.follow(transcript.record, request)
        self._forwarding = forward(
            self.sink,
            way if shared is None else shared.way,
            target=target,
            headers=replica.headers_for(tenant, relayed=relayed + pulls) + (shared.header if shared else b"") + trace,
            body=body,
            done=self._done,
            extra_headers=answer_headers,
            wanted=self._wanted,
            started=self._journey.bytes_came,
            tap=transcript.tap if observed is None else observed.tapped(transcript.tap),
            is_whole=transcript.is_whole,
        )

    def _shared(self, leg: Leg, replica: Replica, way: Upstream, body: bytes) -> _Shared | None:
        """The way by another replica that computes the prompt; None: there is none. Raises if `replica` needs one, and
        such a request has none."""
        services, request, target = self._services, self._request, self._routed.surface.path
        prefill, handover = services.replicas.get(leg.source_replica), replica.handover
        if prefill is None or handover is None or prefill.handover != handover:
            return None
        assert isinstance(way, PreparedRequest)
        if not can_be_split(handover, target, way.body):
            two_legs.check_alone(replica)
            services.recorder.prefilled(request.model, prefill.id, two_legs.Outcome.NOT_SHARED, "")
            return None
        other = prefill.way(self._routed.caller.tenant, target, body, request.adapter)
        assert isinstance(other, PreparedRequest)
        header = b"x-request-id: %b-%08x\r\n" % (request.id.encode(), randbits(32))  # of this attempt, at both
        first, now = handover == "params", services.clock.now()
        trace, visit = self._account.timeline.sent_to_prefill(prefill.id, now)
        prefill_leg = two_legs.PrefillLeg(
            prefill,
            other,
            prefill.headers + header + trace,
            source=self._source_of_failures(),
            told=_PrefillRecord(services, request.model, now, visit).end,
            changed=services.replicas.changed,
            patience_s=two_legs.patience_s(prefill, request.prompt_tokens) if first else None,
        )
        if first:
            return _Shared(two_legs.PrefillFirst(prefill_leg, way), header)
        return _Shared(two_legs.PrefillBeside(prefill_leg, way, randbits(ROOM_BITS), self._peer_failed), header)

    def _peer_failed(self, is_lost: bool) -> None:
        if self.stop(is_blamed=None):
            self._run(self._journey.source_failed(is_lost=is_lost))

    def _source_of_failures(self) -> str:
        """Failures have a source, for the breaker: the tenant; before there are tenants, the request itself."""
        services = self._services
        return self._routed.caller.tenant.id if services.keys.has_had_tenants else str(self._request.fingerprint)

    def stop(self, is_blamed: bool | None) -> bool:
        """Gives up the replica that has it. Returns whether there was one."""
        if self._forwarding is None:
            return False
        self._forwarding.cancel()
        self._forwarding = None
        self._leave_replica(is_blamed)
        return True

    def settle(self, charge: Charge) -> TokenUsage | None:
        """The request is over. Returns the usage that its tenant is charged for; None: for none."""
        self._run = _run_nothing  # or the request and its upstream side would hold each other
        transcript, outcome, services = self._transcript, self.outcome, self._services
        if not self._routed.surface.is_metered:
            return NO_TOKENS if charge in (Charge.WHOLE, Charge.SEEN, Charge.PART) else None
        if charge is Charge.SEEN:
            return transcript.usage(outcome) or transcript.guess()
        if charge is Charge.PART:
            return transcript.usage(None) or transcript.guess_part()
        if charge is not Charge.WHOLE:
            return None
        assert outcome is not None
        usage, replica_id = transcript.usage(outcome), self._journey.legs[0].replica
        if usage is None:
            services.recorder.usage_missing(self._request.model, replica_id)
            return transcript.guess_whole()
        is_own_speed = self.is_stream and self._journey.legs[0].source is None
        if is_own_speed and (replica := services.replicas.get(replica_id)) is not None:
            services.snapshots.answered(replica, usage, outcome)
        return usage

    # -- in flight

    def id_to_move(self) -> str | None:
        record, journey = self._transcript.record, self._journey
        if record is None or not journey.is_begun or not self._services.failover.can_move(self._request, journey):
            return None
        return record.stream_id

    def replica_lost(self) -> None:
        """Its replica hangs, or is gone without its connection saying so."""
        if self.stop(is_blamed=True):
            self._run(self._journey.replica_lost(**self._progress()))

    # -- inside

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
        services.admission.started(self._request.id, now)
        return True

    def _done(self, outcome: Outcome) -> None:
        self._forwarding, self.outcome, end, status = None, outcome, outcome.end, outcome.status or 0
        if end is End.COMPLETED:
            self._leave_replica(is_blamed=False)
            self._run(self._journey.completed(status))
            return
        relays = self._attempt is not None and self._attempt.replica.relays
        has_lost, is_blamed = is_lost(outcome, relays=relays), is_replicas_fault(outcome)
        self._leave_replica(is_blamed, is_doubtful=end is End.DECLINED)
        if end is End.CLIENT_GONE:
            has_all = self._routed.surface.last_event in outcome.tail  # many do not wait for the end in form
            self._run(self._journey.client_gone(has_all=has_all))
        elif end is End.DECLINED:
            if not is_blamed and self._routed.observed is not None:
                self._routed.observed.refused(self._request.version)
            failure = failure_of_answer(status, outcome.tail) if self._chain is not None else None
            self._run(self._journey.declined(status, failure, is_lost=has_lost, **self._progress()))
        else:
            self._fail(has_lost=has_lost)

    def _fail(self, *, has_lost: bool) -> None:
        self.outcome = None
        self._run(self._journey.failed(is_lost=has_lost, **self._progress()))

    def _progress(self) -> dict[str, Any]:
        made = self._transcript.num_tokens - self._tokens_before
        return {"num_tokens": made, "is_resumable": self._transcript.record is not None}

    def _leave_replica(self, is_blamed: bool | None, *, is_doubtful: bool = False) -> None:
        attempt, self._attempt, now = self._attempt, None, self._services.clock.now()
        if (trace := self._account.timeline.trace) is not None:
            trace.left(now, has_failed=bool(is_blamed))
        if is_blamed and self._routed.observed is not None:
            self._routed.observed.failed(self._request.version)
        if attempt is None:
            return
        if attempt.end(is_blamed, now, is_doubtful=is_doubtful):
            self._services.replicas.changed(attempt.replica)
        if is_blamed and is_doubtful:
            self._doubted.append(attempt)
