"""One request on its way through the door: its toll, its place in the queue, the replica, the answer, the bill.

Everything here is called back from the event loop and returns at once. Whatever the end, `_close` runs once: the toll
is settled, the admission's entry closed, the usage recorded.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from msgspec.structs import replace

from penstock.admission.admission import Used
from penstock.admission.decision import Admit, Decision, Queued
from penstock.api.relay import StreamRecord, is_whole
from penstock.api.sse import error_event
from penstock.core.errors import EngineFailed, EngineUnavailable, PenstockError
from penstock.dialects.usage import StreamTally
from penstock.gateway import refusals
from penstock.gateway.course import Course
from penstock.gateway.fallback import Chain, failure_of_answer, failure_of_shed
from penstock.gateway.http.forward import End, Forwarding, Outcome, forward
from penstock.gateway.http.message import JSON, ResponseHead
from penstock.gateway.inquiry import Inquiry
from penstock.gateway.recorder import Ending, ending_of
from penstock.gateway.replicas import ENVELOPE_HEADER, STREAM_HEADER, Replica
from penstock.gateway.sizes import Size
from penstock.gateway.spent import TokenUsage, find_usage
from penstock.gateway.stay import Stay, is_replicas_fault
from penstock.gateway.toll import Toll
from penstock.router.request import EdgeRequest
from penstock.router.router import Choice
from penstock.router.routes import Failure
from penstock.tenancy.limits.quota import Quota

if TYPE_CHECKING:
    from penstock.gateway.door import Door

_MOST_TRIES = 3
_BACKOFF_S = 0.05  # at most, before the second try; doubled for the third
_MOST_MOVES = 10  # of a stream that has begun: one that ends every replica it comes to must not meet them all
_TRY_ELSEWHERE = (429, 500, 502, 503, 504, 529)  # from a replica: another may do better


class Passage:
    __slots__ = ("_bill", "_body", "_chain", "_choice", "_course", "_declined", "_door", "_exchange", "_forwarding",
                 "_inquiry", "_is_open", "_num_moves", "_record", "_size", "_stay", "_tally", "_toll", "_tried",
                 "is_stream",
                 "request")  # fmt: skip

    def __init__(
        self, door: Door, inquiry: Inquiry, request: EdgeRequest, size: Size, body: bytes, quota: Quota | None,
        chain: Chain | None,
    ) -> None:  # fmt: skip
        """`body`: as its replicas are sent it; `chain`: of models, where its route has fallbacks."""
        self.request = request
        self.is_stream = bool(inquiry.asked.stream)
        self._door = door
        self._inquiry = inquiry
        self._exchange = inquiry.exchange
        self._size = size
        self._body = body
        self._chain = chain
        self._toll = (
            Toll(door.limiter, quota, inquiry, size, request.fingerprint, self._paid) if quota is not None else None
        )
        self._bill = door.bill(inquiry)
        self._course = Course(door.now())
        self._is_open = True
        self._choice: Choice | None = None  # of that replica, and why
        self._stay: Stay | None = None  # at a replica
        self._tried: set[str] = set()  # replicas, since one last answered
        self._num_moves = 0
        self._forwarding: Forwarding | None = None
        self._record: StreamRecord | None = None  # of a stream that another replica could carry on
        self._tally: StreamTally | None = None  # of one that none could
        self._declined: Outcome | None = None

    # -- in

    def begin(self) -> None:
        self._exchange.watcher = self
        if self._toll is None:
            self._submit()
        else:
            self._toll.pay()

    def _paid(self, error: PenstockError | None) -> None:
        if error is not None:
            self._refuse(error)
            return
        size = self._size
        if size.exact is not None:
            self.request = replace(self.request, prompt_tokens=size.prompt, context_tokens=size.context_tokens)
        self._submit()

    def _submit(self) -> None:
        if self._chain is not None:
            self._chain.watch(self._too_slow)
        self.decided(self._door.admission.submit(self.request, self._door.now()))

    def decided(self, decision: Decision) -> None:
        if isinstance(decision, Admit):
            self._choose(decision.choice)
            self._send(self._door.replicas[decision.replica_id])
        elif isinstance(decision, Queued):
            self._door.waits(self)
        elif not self._fall_back(failure_of_shed(decision.reason)):
            self._refuse(refusals.shed(decision, self._size))

    # -- to a replica and back

    def _choose(self, choice: Choice) -> None:
        self._choice = choice
        self._door.recorder.chose(self.request, choice, self._door.now())

    def _send(self, replica: Replica, envelope: bytes | None = None) -> None:
        """`envelope`: the stream has begun elsewhere, and this is how far it has come."""
        now = self._door.now()
        self._stay = Stay(replica, self, now)
        self._course.sent(replica.id, now)
        self._tried.add(replica.id)
        tenant, relayed = self._inquiry.caller.tenant, b""
        if envelope is not None:
            relayed = ENVELOPE_HEADER
        elif self.is_stream and replica.relays:
            relayed, self._record = STREAM_HEADER, StreamRecord()
            self._bill.follow(self._record, self.request.model, self._toll.progress if self._toll else None)
        elif self.is_stream:
            self._tally = StreamTally()
        seen = self._record or self._tally
        self._forwarding = forward(
            self._exchange,
            replica.way(tenant),
            target=self._inquiry.surface.path,
            headers=replica.headers_for(tenant, relayed=relayed),
            body=envelope if envelope is not None else self._body,
            done=self._done,
            extra_headers=self._headers(),
            wanted=self._wanted,
            tap=seen.append if seen is not None else None,
            is_whole=is_whole if self._record is not None else None,
        )

    def _wanted(self, head: ResponseHead) -> bool:
        """An answer of an overloaded or broken replica is kept back while another can be tried."""
        if head.status in _TRY_ELSEWHERE or (self._exchange.is_started and head.status != 200):
            return False
        if self._chain is not None and self._chain.holds_back(head.status):
            return False
        if len(self._tried) > 1 and self._stay is not None:
            self._tried = {self._stay.replica.id}
        now = self._door.now()
        self._course.answered(now)
        self._door.admission.started(self.request.id, now)
        return True

    def _done(self, outcome: Outcome) -> None:
        self._forwarding = None
        self._leave_replica(is_replicas_fault(outcome))
        match outcome.end:
            case End.COMPLETED if outcome.status == 200:
                self._close(self._usage(outcome))
            case End.COMPLETED:
                self._close(None, Ending.REFUSED, f"replica_{outcome.status}")
            case End.CLIENT_GONE:
                has_all = self._inquiry.surface.last_event in outcome.tail  # many do not wait for the end in form
                self._close(self._usage(outcome) or self._guess(), Ending.OK if has_all else Ending.CLIENT_GONE)
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

    def replica_lost(self) -> None:
        """Its replica hangs, or is gone without its connection saying so."""
        if self._stop_forwarding(is_blamed=True):
            self._carry_on() if self._exchange.is_started else self._try_again()

    def _stop_forwarding(self, is_blamed: bool | None) -> bool:
        if self._forwarding is None:
            return False
        self._forwarding.cancel()
        self._forwarding = None
        self._exchange.watcher = self
        self._leave_replica(is_blamed)
        return True

    def _leave_replica(self, is_blamed: bool | None) -> None:
        stay, self._stay = self._stay, None
        if stay is not None and stay.end(is_blamed, self._door.now()):
            self._door.replica_changed(stay.replica)

    def _try_again(self) -> None:
        """The client has seen nothing yet."""
        may_retry = len(self._tried) < _MOST_TRIES and self._door.retries.take()
        replica = self._next_replica(self.request.prompt_tokens) if may_retry else None
        if replica is not None:
            self._door.recorder.retried(self.request.model)
            self._exchange.watcher = self
            backoff_s = _BACKOFF_S * 2 ** (len(self._tried) - 1) * self._door.random.random()
            asyncio.get_running_loop().call_later(backoff_s, self._retry, replica)
        elif self._fall_back(Failure.ERROR):
            pass
        elif self._declined is not None and self._declined.status is not None:
            self._pass_on_declined(self._declined)
        else:
            self._refuse(EngineUnavailable("no replica could take this request", retry_after_s=1.0))

    def _retry(self, replica: Replica) -> None:
        if self._is_open:
            self._send(replica)

    def _carry_on(self) -> None:
        """The client has seen a part: the rest must follow it without a gap, or the stream ends with an error.

        The retry budget has no say: hundreds of streams may lose their replica at once, and each is owed its rest.
        """
        record = self._record
        self._num_moves += 1
        envelope = record.envelope(self._body) if record is not None and self._num_moves <= _MOST_MOVES else None
        replica = self._next_replica(self.request.kv_tokens) if envelope is not None else None
        if replica is not None and replica.relays:
            self._door.recorder.carried_on(self.request.model)
            self._send(replica, envelope)
            return
        error = EngineFailed("the replica failed in the middle of the answer")
        self._exchange.write(error_event(error, self.request.id, self._inquiry.surface.convention), is_last=True)
        self._close(self._usage(None), *ending_of(error))

    def _next_replica(self, known_tokens: int) -> Replica | None:
        if not self._is_open:
            return None
        door, is_begun = self._door, self._exchange.is_started
        avoid = frozenset(self._tried)
        if is_begun:  # only a penstock replica carries on what another began
            avoid |= {replica.id for replica in door.replicas.values() if not replica.relays}
        choice = door.admission.reroute(self.request.id, door.now(), avoid, known_tokens, is_begun=is_begun)
        if choice is None or choice.replica is None:
            return None
        self._choose(choice)
        return door.replicas[choice.replica.id]

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
        self._door.finished(self.request.id, Used(self.request.prompt_tokens, 0))
        self._door.recorder.fell_back(self.request.model, move.request.model, failure.value)
        self.request, self._size, self._body = move
        self._tried, self._record, self._tally, self._declined = set(), None, None, None
        self._bill.stop()
        self._course.starts_over()
        self._submit()
        return True

    # -- the client

    def client_gone(self) -> None:
        """It left before anything was forwarded: waiting for the limiter, for a place, or for another replica."""
        self._close(None, Ending.CLIENT_GONE)

    def pause(self) -> None:
        pass  # nothing is being written

    def resume(self) -> None:
        pass

    # -- out

    def _headers(self) -> bytes:
        headers = self._door.id_header(self.request.id)
        if self._choice is not None:
            headers += self._door.route_headers(self._choice)
        if self._inquiry.ruling is not None:
            headers += self._inquiry.ruling.header
        return headers if self._chain is None else headers + self._chain.header

    def _refuse(self, error: PenstockError) -> None:
        self._door.refuse(self._exchange, self._inquiry.surface.convention, error, self.request.id)
        self._door.recorder.refused(error)
        self._close(None, *ending_of(error))

    def _pass_on_declined(self, outcome: Outcome) -> None:
        """Every replica said no: the client gets the last one's answer."""
        assert outcome.status is not None
        self._exchange.respond(outcome.status, JSON + self._headers(), outcome.tail)
        ending = Ending.FAILED if outcome.status >= 500 else Ending.REFUSED
        self._close(None, ending, f"replica_{outcome.status}")

    def _usage(self, outcome: Outcome | None) -> TokenUsage | None:
        if outcome is not None and outcome.status != 200:
            return None
        found = find_usage(outcome.tail) if outcome is not None else None
        if found is None and self._record is not None and (prompt := self._record.prompt_tokens) is not None:
            found = TokenUsage(prompt, self._record.num_tokens)
        if found is not None:
            self._size.learn(found.input_tokens)
        return found

    def _guess(self) -> TokenUsage:
        """Of a client that left before a server that says its usage last: by the events it got, or all it might get."""
        prompt, output = self._size.most_used
        return TokenUsage(prompt, output) if self._tally is None else TokenUsage(prompt, self._tally.output_tokens)

    def _close(self, usage: TokenUsage | None, ending: Ending = Ending.OK, reason: str = "") -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._exchange.watcher = None
        if self._chain is not None:
            self._chain.close()
        door, request = self._door, self.request
        if usage is not None:
            self._bill.close(request.model, usage)
            door.lengths.learn(request.tenant, request.model, usage.output_tokens)
        else:
            self._bill.stop()
        if self._toll is not None:
            self._toll.settle(usage.total if usage is not None else None)
        door.finished(request.id, Used(usage.input_tokens, usage.output_tokens) if usage is not None else None)
        door.recorder.ended(self._course.facts(self._inquiry, request.model, usage, ending, reason, door.now()))
        if self._inquiry.ruling is not None:
            door.recorder.rules.ended(self._inquiry.ruling, request.model, usage, door.prices)
        if ending is Ending.OK:
            door.shadows.mirror(self._inquiry, request.model, self._size.output)
