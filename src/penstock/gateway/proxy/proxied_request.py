"""One request on its way through the gateway: rate limits, the queue, a replica, the answer, the bill.

Everything here is called back from the event loop and returns at once. Whatever the end, `_close` runs once: the toll
is settled, the admission's entry closed, the usage recorded.
"""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING
from zlib import crc32

from msgspec.structs import replace

from penstock.admission.decision import Admit, Decision, Queued
from penstock.api import server_timing
from penstock.api.sse import error_event
from penstock.core.errors import EngineFailed, EngineUnavailable, PenstockError
from penstock.gateway.proxy import refusals
from penstock.gateway.proxy.fallback import Chain, failure_of_answer, failure_of_shed
from penstock.gateway.proxy.rate_limit import RateLimitReservation
from penstock.gateway.proxy.replica_attempt import ReplicaAttempt, is_lost, is_replicas_fault
from penstock.gateway.proxy.routed_request import RoutedRequest
from penstock.gateway.proxy.transcript import Transcript
from penstock.gateway.records.accounting import RequestAccounting
from penstock.gateway.records.facts import Ending, ending_of
from penstock.gateway.records.token_usage import TokenUsage
from penstock.gateway.replicas.replica import Replica
from penstock.gateway.tokens.request_size import Size
from penstock.health import quarantine
from penstock.health.retries import Tries
from penstock.http.forward import End, Forwarding, Outcome, forward
from penstock.http.message import ResponseHead
from penstock.router.request import EdgeRequest
from penstock.router.router import Choice
from penstock.router.routes import Failure
from penstock.tenancy.limits.quota import Quota

if TYPE_CHECKING:
    from penstock.gateway.app import Gateway

_BUSY = 429
_TRY_ELSEWHERE = (429, 500, 502, 503, 504, 529)  # from a replica: another may do better


class ProxiedRequest:
    __slots__ = (
        "_account",
        "_attempt",
        "_chain",
        "_choice",
        "_declined",
        "_doubted",
        "_exchange",
        "_forwarding",
        "_gateway",
        "_is_open",
        "_reservation",
        "_routed",
        "_size",
        "_tokens_before",
        "_transcript",
        "_tries",
        "is_stream",
        "request",
    )

    def __init__(
        self,
        gateway: Gateway,
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
        self._gateway = gateway
        self._routed = routed
        self._exchange = routed.exchange
        self._size = size
        self._transcript = Transcript(body, size, is_stream=self.is_stream)
        self._chain = chain
        self._reservation = None
        if quota is not None:
            services, tenant = gateway.services, routed.caller.tenant.id
            fingerprint = crc32(routed.body) | 1  # as at its entry: what it comes back with after a refusal
            self._reservation = RateLimitReservation(
                services.limiter, gateway.clock, quota, tenant, size, fingerprint, self._paid
            )
        self._account = RequestAccounting(gateway, routed, self._reservation)
        self._is_open = True
        self._choice: Choice | None = None  # of that replica, and why
        self._attempt: ReplicaAttempt | None = None  # at a replica
        self._tokens_before = 0  # that others had made when it was sent there
        self._tries = Tries()
        self._forwarding: Forwarding | None = None
        self._declined: Outcome | None = None
        self._doubted: list[
            ReplicaAttempt
        ] = []  # at replicas that answered with an error, perhaps by this request's own fault

    # -- in

    def begin(self) -> None:
        self._exchange.watcher = self
        if self._routed.entry is not None:
            self._routed.entry.settle(None)
        self._submit() if self._reservation is None else self._reservation.pay()

    def _paid(self, error: PenstockError | None) -> None:
        if error is not None:
            self._refuse(error)
            return
        if (size := self._size).exact is not None:
            self.request = replace(self.request, prompt_tokens=size.prompt, context_tokens=size.context_tokens)
        self._submit()

    def _submit(self) -> None:
        if self._chain is not None:
            self._chain.watch(self._too_slow)
        self.decided(self._gateway.admission.submit(self.request, self._gateway.now()))

    def decided(self, decision: Decision) -> None:
        if isinstance(decision, Admit):
            self._choose(decision.choice)
            self._send(self._gateway.replicas[decision.replica_id])
        elif isinstance(decision, Queued):
            self._gateway.waits(self)
        elif not self._fall_back(failure_of_shed(decision.reason)):
            self._refuse(refusals.shed(decision, self._size))

    # -- to a replica and back

    def _choose(self, choice: Choice) -> None:
        self._choice = choice
        self._account.chose(self.request, choice)

    def _send(self, replica: Replica, rest: tuple[bytes, bytes] | None = None) -> None:
        """`rest`: the stream has begun elsewhere, and this asks for what is left of it."""
        if not self._is_open:  # the client left before the next try
            return
        tenant, transcript, target = self._routed.caller.tenant, self._transcript, self._routed.surface.path
        relayed, body = rest or transcript.letter(replica)
        try:
            way = replica.way(tenant, target, body, self.request.adapter)
        except PenstockError as error:  # such a server must not be sent it, which says nothing about the replica
            self._refuse(error)
            return
        now = self._gateway.now()
        self._attempt = ReplicaAttempt(replica, self, now, self._source)
        trace = self._account.timeline.sent(replica.id, now)
        self._tries.sent(replica.id)
        self._tokens_before = transcript.num_tokens if rest is not None else 0
        if rest is None and transcript.record is not None:
            self._account.follow(transcript.record, self.request)
        self._forwarding = forward(
            self._exchange,
            way,
            target=target,
            headers=replica.headers_for(tenant, relayed=relayed) + trace,
            body=body,
            done=self._done,
            extra_headers=self._headers(),
            wanted=self._wanted,
            tap=transcript.tap,
            is_whole=transcript.is_whole,
        )

    @property
    def _source(self) -> str:
        """The source of failures for the breaker: the tenant; before there are tenants, the request itself."""
        tenants, caller = self._gateway.services.keys.has_had_tenants, self._routed.caller
        return caller.tenant.id if tenants else str(self.request.fingerprint)

    def _wanted(self, head: ResponseHead) -> bool:
        """An answer of an overloaded or broken replica is kept back while another can be tried."""
        is_of_use = head.status == 200 or not (self._exchange.is_started or head.status in _TRY_ELSEWHERE)
        if not is_of_use or (self._chain is not None and self._chain.holds_back(head.status)):
            return False
        if self._attempt is not None:
            self._tries.answered(self._attempt.replica.id)
        self._transcript.answered(head)
        now = self._gateway.now()
        doubted, self._doubted = self._doubted, []
        for attempt in doubted:
            if attempt.prove(now):
                self._gateway.replicas.changed(attempt.replica)
        self._account.timeline.answered(now, head.headers.get(server_timing.HEADER, b""))
        self._gateway.admission.started(self.request.id, now)
        return True

    def _done(self, outcome: Outcome) -> None:
        self._forwarding = None
        replica = self._leave_replica(is_replicas_fault(outcome), is_doubtful=outcome.end is End.DECLINED)
        if replica is not None and is_lost(outcome, relays=replica.relays) and self._is_culprit(replica):
            return
        match outcome.end:
            case End.COMPLETED if outcome.status is not None and 200 <= outcome.status < 300:
                usage = self._transcript.usage(outcome)
                if usage is not None and self.is_stream and replica is not None:
                    self._gateway.snapshots.answered(replica, usage, outcome)
                if usage is None and replica is not None:
                    self._gateway.recorder.usage_missing(self.request.model, replica.id)
                self._close(usage or self._transcript.guess_whole())
            case End.COMPLETED:
                self._pay_for_refusal(outcome.status)
                self._close(None, Ending.REFUSED, f"replica_{outcome.status}")
            case End.CLIENT_GONE:
                has_all = self._routed.surface.last_event in outcome.tail  # many do not wait for the end in form
                usage = self._transcript.usage(outcome) or self._transcript.guess()
                self._close(usage, Ending.OK if has_all else Ending.CLIENT_GONE)
            case End.FAILED_AFTER | End.UNFINISHED:
                self._carry_on()
            case _:
                self._declined = outcome if outcome.end is End.DECLINED else None
                if self._exchange.is_started:
                    self._carry_on()
                elif self._chain is not None and self._chain.holds_back(outcome.status):
                    self._turned_down(outcome)
                else:
                    self._try_again()

    def id_to_move(self) -> str | None:
        record, gateway = self._transcript.record, self._gateway
        if record is None or not (self._exchange.is_started and self._tries.may_move):
            return None
        has_other = gateway.admission.has_other(self.request.id, gateway.now(), self._avoided())
        return record.stream_id if has_other else None

    def replica_lost(self) -> None:
        """Its replica hangs, or is gone without its connection saying so."""
        replica = self._attempt.replica if self._attempt is not None else None
        if self._stop_forwarding(is_blamed=True) and not (replica is not None and self._is_culprit(replica)):
            self._carry_on() if self._exchange.is_started else self._try_again()

    def _stop_forwarding(self, is_blamed: bool | None) -> bool:
        if self._forwarding is None:
            return False
        self._forwarding.cancel()
        self._forwarding = None
        self._exchange.watcher = self
        self._leave_replica(is_blamed)
        return True

    def _leave_replica(self, is_blamed: bool | None, *, is_doubtful: bool = False) -> Replica | None:
        attempt, self._attempt, now = self._attempt, None, self._gateway.now()
        self._account.timeline.left(now, is_blamed)
        if attempt is not None and attempt.end(is_blamed, now, is_doubtful=is_doubtful):
            self._gateway.replicas.changed(attempt.replica)
        if attempt is not None and is_blamed and is_doubtful:
            self._doubted.append(attempt)
        return attempt.replica if attempt is not None else None

    def _is_culprit(self, lost: Replica) -> bool:
        """A replica was lost with this request. If that is one too many, the request ends here, and pays for what it
        used, or might have."""
        losses, gateway = self._tries.losses, self._gateway
        losses.add(lost.id, self._transcript.num_tokens - self._tokens_before)
        if not losses.is_culprit:
            return False
        tenant, error = self._routed.caller.tenant.id, quarantine.refusal()
        fingerprint = gateway.quarantine.add(tenant, self._routed.surface.path, self._routed.body, gateway.now())
        gateway.recorder.quarantined(self.request.model, tenant, fingerprint, losses.replicas)
        self._account.timeline.quarantined(fingerprint)
        usage = self._transcript.usage(None) or self._transcript.guess()
        if self._exchange.is_started:
            self._end_stream(error)
        else:
            gateway.refuse(self._exchange, self._routed.surface.convention, error, self.request.id)
        self._close(usage, *ending_of(error))
        return True

    def _try_again(self) -> None:
        """The client has seen nothing yet."""
        may_retry = self._tries.retry(self._gateway.retries)
        replica = self._next_replica(self.request.prompt_tokens) if may_retry else None
        if replica is not None:
            self._gateway.recorder.retried(self.request.model)
            self._exchange.watcher = self
            backoff_s = self._tries.max_backoff_s * self._gateway.random.random()
            self._gateway.clock.call_later(backoff_s, self._send, replica)
        elif self._fall_back(Failure.ERROR):
            pass
        elif self._declined is not None and self._declined.status is not None:
            self._pass_on_declined(self._declined)
        else:
            self._refuse(EngineUnavailable("no replica could take this request", retry_after_s=1.0))

    def _carry_on(self) -> None:
        """The client has seen a part: the rest must follow it without a gap, or the stream ends with an error."""
        if not self._is_open or self._transcript.record is None or not self._tries.move():
            self.break_off()
        elif not self.resume_elsewhere():
            self._exchange.watcher = self
            self._gateway.stranded.add(self, self._gateway.replicas)

    def resume_elsewhere(self) -> bool:
        replica = self._next_replica(self.request.kv_tokens)
        if replica is None:
            return False
        rest = self._transcript.rest_letter(replica)
        if rest is None:
            self.break_off()
        else:
            self._gateway.recorder.carried_on(self.request.model)
            self._send(replica, rest)
        return True

    def forget_tries(self, lost: Set[str]) -> None:
        self._tries.replicas -= lost

    def break_off(self) -> None:
        error = EngineFailed("the replica failed in the middle of the answer")
        self._end_stream(error)
        self._close(self._transcript.usage(None) or self._transcript.guess_part(), *ending_of(error))

    def _end_stream(self, error: PenstockError) -> None:
        self._exchange.write(error_event(error, self.request.id, self._routed.surface.convention), is_last=True)

    def _next_replica(self, known_tokens: int) -> Replica | None:
        if not self._is_open:
            return None
        gateway, is_begun = self._gateway, self._exchange.is_started
        avoid = self._avoided()
        choice, losses = None, self._tries.losses
        if losses.replicas:
            usable = gateway.pools[self.request.model].ready_replicas - avoid
            if apart := losses.apart(usable):
                choice = self._reroute(avoid | apart, known_tokens, is_begun)
        choice = choice or self._reroute(avoid, known_tokens, is_begun)
        if choice is None or choice.replica is None:
            return None
        self._choose(choice)
        return gateway.replicas[choice.replica.id]

    def _avoided(self) -> frozenset[str]:
        """Replicas that it must not go to next."""
        replicas, avoid = self._gateway.replicas, frozenset(self._tries.replicas)
        if self._exchange.is_started:  # only a penstock replica carries on what another began
            avoid |= {replica.id for replica in replicas.values() if not replica.relays}
        return avoid | self._tries.losses.forbidden(replicas) if self._tries.losses.replicas else avoid

    def _reroute(self, avoid: frozenset[str], known_tokens: int, is_begun: bool) -> Choice | None:
        gateway = self._gateway
        return gateway.admission.reroute(self.request.id, gateway.now(), avoid, known_tokens, is_begun=is_begun)

    # -- to another model

    def _turned_down(self, outcome: Outcome) -> None:
        """An answer that no other replica of this model would change, but the next model might."""
        failure = failure_of_answer(outcome.status, outcome.tail)
        if failure is None or not self._fall_back(failure):
            self._pass_on_declined(outcome)

    def _too_slow(self) -> None:
        if self._is_open and not self._exchange.is_started:
            self._fall_back(Failure.SLOW)

    def _fall_back(self, failure: Failure) -> bool:
        """On to the next model of the chain, if there is one, as if that had been asked for. What is reserved stays."""
        move = self._chain.move(failure, self.request) if self._chain is not None else None
        if move is None:
            return False
        self._stop_forwarding(is_blamed=None)
        self._account.start_over(self.request.id, self.request.prompt_tokens)
        self._gateway.recorder.fell_back(self.request.model, move.request.model, failure.value)
        self.request, self._size, body = move
        self._transcript = Transcript(body, self._size, is_stream=self.is_stream)
        self._tries, self._declined = Tries(self._tries.losses), None
        self._submit()
        return True

    # -- the client

    def client_gone(self) -> None:
        """It left while nothing was forwarded: waiting for the limiter, for a place, or for another replica."""
        usage = self._transcript.usage(None) or self._transcript.guess() if self._exchange.is_started else None
        self._close(usage, Ending.CLIENT_GONE)

    def pause(self) -> None:
        """Nothing is being written."""

    resume = pause

    # -- out

    def _headers(self) -> bytes:
        headers = self._gateway.id_header(self.request.id)
        if self._choice is not None:
            headers += self._gateway.route_headers(self._choice, self._routed.caller.tenant)
        if self._routed.ruling is not None:
            headers += self._routed.ruling.header
        return headers if self._chain is None else headers + self._chain.header

    def _refuse(self, error: PenstockError) -> None:
        self._gateway.refuse(self._exchange, self._routed.surface.convention, error, self.request.id)
        self._gateway.recorder.refused(error)
        self._close(None, *ending_of(error))

    def _pass_on_declined(self, outcome: Outcome) -> None:
        """Every replica said no: the client gets the last one's answer."""
        assert outcome.status is not None
        self._exchange.respond(outcome.status, outcome.headers + self._headers(), outcome.tail)
        self._pay_for_refusal(outcome.status)
        self._close(None, Ending.FAILED if outcome.status >= 500 else Ending.REFUSED, f"replica_{outcome.status}")

    def _pay_for_refusal(self, status: int | None) -> None:
        """A request that its replica calls wrong has cost one, though no tokens."""
        if self._reservation is not None and status is not None and 400 <= status < 500 and status != _BUSY:
            self._reservation.settle(0)

    def _close(self, usage: TokenUsage | None, ending: Ending = Ending.OK, reason: str = "") -> None:
        if not self._is_open:
            return
        self._is_open, self._exchange.watcher = False, None
        self._gateway.stranded.discard(self)
        if self._chain is not None:
            self._chain.close()
        self._account.close(self.request, usage, ending, reason)
        if ending is Ending.OK:
            self._gateway.shadows.mirror(self._routed, self.request.model, self._size.output)
