"""One request on its way through the door: its limits, its place in the queue, the replica, the answer, the bill.

Everything here is called back from the event loop and returns at once. Whatever the end, `_close` runs once: the
reservation is settled, the ledger's entry closed, the usage recorded.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from penstock.admission.admission import Used
from penstock.admission.decision import Admit, Decision, Queued, Shed, ShedReason
from penstock.api import relay
from penstock.api.relay import StreamRecord, is_whole
from penstock.api.sse import error_event
from penstock.core.errors import (
    ContextLengthExceeded,
    EngineFailed,
    EngineUnavailable,
    Overloaded,
    PenstockError,
    RateLimited,
)
from penstock.gateway.asked import Asked, Surface
from penstock.gateway.health.breaker import Attempt
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.http.forward import End, Forwarding, Outcome, forward
from penstock.gateway.http.message import JSON, ResponseHead, render
from penstock.gateway.replicas import Replica
from penstock.gateway.spent import TokenUsage, find_usage
from penstock.router.request import EdgeRequest
from penstock.tenancy.limits.limiter import Answer, Held
from penstock.tenancy.limits.quota import Quota, Refusal

if TYPE_CHECKING:
    from penstock.gateway.door import Door
    from penstock.tenancy.keys import Caller

_MOST_TRIES = 3
_WAIT_S, _MOST_WAITS = 0.05, 200
_RETRY_COUNT = b"x-stainless-retry-count"  # of OpenAI's and Anthropic's clients: 0 on a first try
_TRY_ELSEWHERE = (429, 500, 502, 503, 504, 529)  # from a replica: another may do better
_BUSY = (429, 503, 529)  # it works, and says that it cannot now
_STREAM_HEADER = render([(relay.HEADER.encode(), relay.STREAM.encode())])
_ENVELOPE_HEADER = render([(relay.HEADER.encode(), relay.ENVELOPE.encode())])


class Passage:
    def __init__(
        self, door: Door, exchange: Exchange, surface: Surface, caller: Caller, asked: Asked, request: EdgeRequest,
        body: bytes,
    ) -> None:  # fmt: skip
        self.request = request
        self._door = door
        self._exchange = exchange
        self._surface = surface
        self._caller = caller
        self._asked = asked
        self._body = body
        self._is_open = True
        self._held: Held | None = None
        self._num_waits = 0  # for a slot that was promised
        self._replica: Replica | None = None
        self._attempt: Attempt | None = None
        self._tried: set[str] = set()
        self._forwarding: Forwarding | None = None
        self._record: StreamRecord | None = None
        self._declined: Outcome | None = None

    # -- in

    def begin(self) -> None:
        self._exchange.watcher = self
        quota = self._door.quota(self._caller.tenant)
        if quota is None:
            self._submit()
        else:
            self._reserve(quota)

    def _reserve(self, quota: Quota) -> None:
        if not self._is_open:
            return
        answer = self._door.limiter.reserve(
            self._caller.tenant.id,
            quota,
            self.request.kv_tokens,
            caller=self.request.fingerprint,
            may_claim=self._exchange.request.headers.get(_RETRY_COUNT) != b"0",
        )
        if isinstance(answer, asyncio.Future):
            answer.add_done_callback(lambda done: self._reserved(done.result(), quota))
        else:
            self._reserved(answer, quota)

    def _reserved(self, answer: Answer, quota: Quota) -> None:
        if isinstance(answer, Refusal):
            if answer.is_due and self._num_waits < _MOST_WAITS:  # it came as told: a slot is about to be free
                self._num_waits += 1
                asyncio.get_running_loop().call_later(_WAIT_S, self._reserve, quota)
                return
            self._refuse(
                RateLimited(
                    f"this tenant's limit is reached: {answer.reason.value}",
                    reason=answer.reason.value,
                    retry_after_s=answer.retry_after_s,
                )
            )
            return
        self._held = answer
        if not self._is_open:  # the client left while the limiter was asked
            self._door.limiter.release(answer)
            return
        self._submit()

    def _submit(self) -> None:
        self.decided(self._door.admission.submit(self.request, self._door.now()))

    def decided(self, decision: Decision) -> None:
        if isinstance(decision, Admit):
            self._send(self._door.replicas[decision.replica_id])
        elif isinstance(decision, Queued):
            self._door.waits(self)
        else:
            self._refuse(_refusal(decision))

    # -- to a replica and back

    def _send(self, replica: Replica, envelope: bytes | None = None) -> None:
        """`envelope`: the stream has begun elsewhere, and this is how far it has come."""
        self._replica = replica
        self._tried.add(replica.id)
        replica.riders.add(self)
        self._attempt = replica.breaker.begin(self._door.now())
        headers, body = replica.headers, self._body
        if envelope is not None:
            headers, body = headers + _ENVELOPE_HEADER, envelope
        elif self._asked.stream and replica.relays:
            self._record = StreamRecord()
            headers += _STREAM_HEADER
        self._forwarding = forward(
            self._exchange,
            replica.upstream,
            target=self._surface.path,
            headers=headers,
            body=body,
            done=self._done,
            extra_headers=self._door.id_header(self.request.id),
            wanted=self._wanted,
            tap=self._record.append if self._record is not None else None,
            is_whole=is_whole if self._record is not None else None,
        )

    def _wanted(self, head: ResponseHead) -> bool:
        """An answer of an overloaded or broken replica is kept back while another can be tried."""
        if head.status in _TRY_ELSEWHERE or (self._exchange.is_started and head.status != 200):
            return False
        self._door.admission.started(self.request.id, self._door.now())
        return True

    def _done(self, outcome: Outcome) -> None:
        self._forwarding = None
        self._leave_replica(_blames_replica(outcome))
        match outcome.end:
            case End.COMPLETED | End.CLIENT_GONE:
                self._close(self._usage(outcome) or self._upper_bound(outcome))
            case End.FAILED_AFTER | End.UNFINISHED:
                self._carry_on()
            case _:
                self._declined = outcome if outcome.end is End.DECLINED else None
                self._carry_on() if self._exchange.is_started else self._try_again()

    def replica_lost(self) -> None:
        """Its replica hangs, or is gone without its connection saying so."""
        if self._forwarding is None:
            return
        self._forwarding.cancel()
        self._forwarding = None
        self._exchange.watcher = self
        self._leave_replica(is_blamed=True)
        self._carry_on() if self._exchange.is_started else self._try_again()

    def _try_again(self) -> None:
        """The client has seen nothing yet."""
        replica = self._next_replica(self.request.prompt_tokens)
        if replica is not None:
            self._send(replica)
        elif self._declined is not None and self._declined.status is not None:
            self._pass_on_declined(self._declined)
        else:
            self._refuse(EngineUnavailable("no replica could take this request", retry_after_s=1.0))

    def _carry_on(self) -> None:
        """The client has seen a part: the rest must follow it without a gap, or the stream ends with an error."""
        record = self._record
        envelope = record.envelope(self._body) if record is not None else None
        replica = self._next_replica(self.request.kv_tokens) if envelope is not None else None
        if replica is not None and replica.relays:
            self._send(replica, envelope)
            return
        error = EngineFailed("the replica failed in the middle of the answer")
        self._exchange.write(error_event(error, self.request.id, self._surface.convention), is_last=True)
        self._close(self._usage(None))

    def _next_replica(self, known_tokens: int) -> Replica | None:
        if not self._is_open or len(self._tried) >= _MOST_TRIES or not self._door.retries.take():
            return None
        door = self._door
        choice = door.admission.reroute(self.request.id, door.now(), frozenset(self._tried), known_tokens)
        if choice is None or choice.replica is None:
            return None
        return door.replicas[choice.replica.id]

    def _leave_replica(self, is_blamed: bool | None) -> None:
        """None: what happened says nothing about the replica."""
        replica, self._replica = self._replica, None
        if replica is None:
            return
        replica.riders.discard(self)
        attempt, self._attempt, now = self._attempt, None, self._door.now()
        if attempt is None:
            return
        was_tripped = replica.breaker.is_tripped(now)
        if is_blamed is None:
            attempt.abandoned(now)
        else:
            attempt.failed(now) if is_blamed else attempt.succeeded(now)
        if replica.breaker.is_tripped(now) != was_tripped:
            self._door.replica_changed(replica)

    # -- the client

    def client_gone(self) -> None:
        """It left before anything was forwarded: waiting for the limiter, for a place, or for another replica."""
        self._close(None)

    def pause(self) -> None:
        pass  # nothing is being written

    def resume(self) -> None:
        pass

    # -- out

    def _refuse(self, error: PenstockError) -> None:
        self._door.refuse(self._exchange, self._surface.convention, error, self.request.id)
        self._close(None)

    def _pass_on_declined(self, outcome: Outcome) -> None:
        """Every replica said no: the client gets the last one's answer."""
        assert outcome.status is not None
        self._exchange.respond(outcome.status, JSON + self._door.id_header(self.request.id), outcome.tail)
        self._close(None)

    def _usage(self, outcome: Outcome | None) -> TokenUsage | None:
        if outcome is not None and outcome.status != 200:
            return None
        found = find_usage(outcome.tail) if outcome is not None else None
        if found is None and self._record is not None and (prompt := self._record.prompt_tokens) is not None:
            found = TokenUsage(prompt, self._record.num_tokens)
        return found

    def _upper_bound(self, outcome: Outcome) -> TokenUsage | None:
        """Of a client that left before it was told: a replica has worked for it, and nobody knows how much."""
        if outcome.end is not End.CLIENT_GONE:
            return None
        return TokenUsage(self.request.prompt_tokens, self.request.max_tokens)

    def _close(self, usage: TokenUsage | None) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._exchange.watcher = None
        used = Used(usage.input_tokens, usage.output_tokens) if usage is not None else None
        self._door.closed(self, self._caller, usage)
        if self._held is not None:
            if usage is None:
                self._door.limiter.release(self._held)
            else:
                self._door.limiter.settle(self._held, usage.total)
        self._door.finished(self.request.id, used)


def _blames_replica(outcome: Outcome) -> bool | None:
    if outcome.end is End.CLIENT_GONE:
        return None
    if outcome.end is End.DECLINED:
        return None if outcome.status in _BUSY else True
    return outcome.end in (End.FAILED_BEFORE, End.FAILED_AFTER)


def _refusal(shed: Shed) -> PenstockError:
    if shed.reason is ShedReason.TOO_LARGE:
        return ContextLengthExceeded("prompt and output limit fit no replica of this model")
    if shed.reason is ShedReason.NO_REPLICA:
        return EngineUnavailable(
            "no replica of this model is ready", reason=shed.reason.value, retry_after_s=shed.retry_after_s
        )
    return Overloaded(
        f"too much is asked of this model: {shed.reason.value}",
        reason=shed.reason.value,
        retry_after_s=shed.retry_after_s,
    )
