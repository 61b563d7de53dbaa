"""A request at two servers that are not penstock's: one computes its prompt, the other answers.

    PrefillFirst     vLLM: the answer's leg begins when the prefill's is over, with what that handed out, or without;
                     and again without, if the second server cannot pull it
    PrefillBeside    SGLang: both begin at once; without the first there is no answer, and where it fails the second may
                     be the first to say so

Each is an `Upstream`, so that who forwards through it knows of one call, and gives both legs up with it. The client's
answer, its usage and its failures are the second leg's; of the first nothing is passed on. The prefill counts at its
server like any request, and its end is told to that server's circuit breaker.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import partial

import msgspec

from penstock.core.errors import InvalidRequest
from penstock.dialects import handover
from penstock.gateway.proxy.replica_attempt import ReplicaAttempt
from penstock.gateway.replicas.dialect_upstream import PreparedRequest
from penstock.gateway.replicas.replica import Replica
from penstock.http.call import Call, Failure, Receiver
from penstock.http.clock import Timer
from penstock.http.message import ResponseHead
from penstock.http.upstream import Upstream

_MAX_BYTES = 8 << 20  # of a prefill's answer: the numbers of its blocks are in it
_BUSY = (429, 503, 529)
_PATIENCE_S, _PATIENCE = 10.0, 4.0  # for a prefill: so much, and so many times what it should take
_DOUBT_S = 2.0  # for the end of a prefill, once the other server has answered with an error: whose fault it was


class Outcome(StrEnum):
    """The outcome of a prefill."""

    HANDED_OVER = "handed_over"
    NOT_SHARED = "not_shared"  # it was not asked for: such a request has one server
    UNREACHABLE = "unreachable"  # the connection failed, before or after it was sent
    REFUSED = "refused"  # it answered with an error
    NO_PARAMS = "no_params"  # its answer does not say where the KV is
    NOT_PULLED = "not_pulled"  # it does, and the other server could not get it
    SLOW = "slow"
    LOST = "lost"  # it hangs, or is gone without its connection saying so


Ended = Callable[[Outcome, bytes], None]  # with the answer
Told = Callable[[Replica, Outcome, str], None]
Changed = Callable[[Replica], None]
PeerFailed = Callable[[bool], None]


def _is_fault(status: int) -> bool:
    return status >= 500 and status not in _BUSY


def _is_failed(head: ResponseHead, body: bytes) -> bool:
    """Whether the server says so, with its status or in a stream."""
    return _is_fault(head.status) or handover.is_error(body)


def patience_s(replica: Replica, prompt_tokens: int) -> float:
    """How long a prefill may take there before the other server computes the prompt."""
    seen = replica.snapshot
    return _PATIENCE_S + _PATIENCE * (seen.queue_s + prompt_tokens / seen.prefill_tokens_per_s)


def check_alone(replica: Replica) -> None:
    """Raises for a request that cannot be shared, at a server that does nothing else."""
    if replica.snapshot.needs_peer:
        raise InvalidRequest(
            "this model's servers compute prompts apart from answers: they take chats, and completions of one prompt "
            "or with one answer for each prompt"
        )


class PrefillLeg:
    """An `InFlightRequest` at the server that computes the prompt, and the `Receiver` of what that answers."""

    __slots__ = (
        "_attempt",
        "_body",
        "_call",
        "_changed",
        "_ended",
        "_headers",
        "_keeps_body",
        "_patience_s",
        "_reason",
        "_source",
        "_status",
        "_timer",
        "_told",
        "_way",
        "is_lost",
        "replica",
    )

    is_stream = False

    def __init__(
        self,
        replica: Replica,
        way: PreparedRequest,
        headers: bytes,
        *,
        source: str,
        told: Told,
        changed: Changed,
        patience_s: float | None = None,
    ) -> None:
        """`source`: whose request it is, for the breaker; `told` of its outcome; `changed`: that the breaker opened or
        closed by it. `patience_s`: None, if the other server has its own."""
        self.replica = replica
        self.is_lost = False  # the server was, while it had this
        self._way = way
        self._headers = headers
        self._source = source
        self._told = told
        self._changed = changed
        self._patience_s = patience_s
        self._keeps_body = patience_s is not None
        self._attempt: ReplicaAttempt | None = None
        self._call: Call | None = None
        self._timer: Timer | None = None
        self._ended: Ended | None = None
        self._status = 0
        self._reason = ""  # of a failed connection
        self._body = b""

    @property
    def body(self) -> bytes:
        """The request as its server is sent it, but for the handover."""
        return self._way.body

    @property
    def is_running(self) -> bool:
        return self._ended is not None

    def begin(self, target: bytes, body: bytes, ended: Ended) -> None:
        """`ended` is told once, unless it is cancelled."""
        clock = self._way.clock
        self._ended = ended
        self._attempt = ReplicaAttempt(self.replica, self, clock.now(), self._source)
        if self._patience_s is not None:
            self._timer = clock.call_later(self._patience_s, self._too_slow)
        self._call = self._way.with_body(body).send(b"POST", target, self._headers, body, self)

    def cancel(self) -> None:
        """Nobody needs it any more: its server is told by the end of the connection."""
        self._end(None, is_blamed=None)

    def not_pulled(self) -> None:
        """The handover was of no use."""
        self._told(self.replica, Outcome.NOT_PULLED, "the other server failed to pull it")

    # -- what the server says

    def head(self, head: ResponseHead) -> None:
        self._status = head.status

    def data(self, data: bytes, is_last: bool) -> None:
        if self._keeps_body and len(self._body) <= _MAX_BYTES:
            self._body += data
        if not is_last:
            return
        self._call = None
        status, is_served = self._status, self._status == 200
        is_blamed = False if is_served else (_is_fault(status) or None)
        self._end(Outcome.HANDED_OVER if is_served else Outcome.REFUSED, is_blamed=is_blamed)

    def failed(self, failure: Failure) -> None:
        self._call, self.is_lost = None, failure.was_sent
        self._reason = failure.message
        self._end(Outcome.UNREACHABLE, is_blamed=True)

    # -- in flight

    def id_to_move(self) -> str | None:
        return None

    def replica_lost(self) -> None:
        self.is_lost = True
        self._end(Outcome.LOST, is_blamed=True)

    # -- inside

    def _too_slow(self) -> None:
        self._end(Outcome.SLOW, is_blamed=True)

    def _end(self, outcome: Outcome | None, *, is_blamed: bool | None) -> None:
        ended, self._ended = self._ended, None
        attempt, self._attempt = self._attempt, None
        call, self._call = self._call, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if call is not None:
            call.cancel()
        if attempt is not None and attempt.end(is_blamed, self._way.clock.now()):
            self._changed(self.replica)
        if ended is None or outcome is None:
            return
        if outcome is Outcome.HANDED_OVER and self._keeps_body and handover.params_in(self._body) is None:
            outcome = Outcome.NO_PARAMS
        self._told(self.replica, outcome, self._reason or f"status {self._status}")
        ended(outcome, self._body)


class _BothLegs(Call):
    """The call that stands for both."""

    __slots__ = ("answer", "prefill")

    def __init__(self, upstream: Upstream, receiver: Receiver, prefill: PrefillLeg) -> None:
        super().__init__(upstream, receiver, b"", b"", is_head_only=False)
        self.prefill = prefill
        self.answer: Call | None = None

    def cancel(self) -> None:
        self.receiver = None
        self.prefill.cancel()
        if self.answer is not None:
            self.answer.cancel()

    def pause(self) -> None:
        if self.answer is not None:
            self.answer.pause()

    def resume(self) -> None:
        if self.answer is not None:
            self.answer.resume()


class PrefillFirst(Upstream):
    def __init__(self, prefill: PrefillLeg, answering: PreparedRequest) -> None:
        self._prefill = prefill
        self._answering = answering
        self.clock = answering.clock

    def send(self, method: bytes, target: bytes, headers: bytes, body: bytes, receiver: Receiver) -> Call:
        call = _BothLegs(self, receiver, self._prefill)

        def compute() -> None:
            call.answer = self._answering.send(method, target, headers, body, receiver)

        def pull(params: msgspec.Raw) -> None:
            way = self._answering.with_body(handover.with_params(self._answering.body, params))
            call.answer = way.send(method, target, headers, body, _PulledAnswer(receiver, call, compute))

        def prefilled(outcome: Outcome, answer: bytes) -> None:
            params = handover.params_in(answer) if outcome is Outcome.HANDED_OVER else None
            if call.receiver is None:
                return
            if params is not None:
                pull(params)
            else:
                compute()

        self._prefill.begin(target, handover.prefill_request(self._prefill.body), prefilled)
        return call


class _PulledAnswer:
    """Receiver of the answer of a server that is to pull a prompt's KV. If it cannot, vLLM fails the request by default
    (`kv_load_failure_policy`): then it is asked again, to compute the prompt itself. Nothing has come of it before."""

    __slots__ = ("_call", "_compute", "_head", "_receiver")

    def __init__(self, receiver: Receiver, call: _BothLegs, compute: Callable[[], None]) -> None:
        self._receiver = receiver
        self._call = call
        self._compute = compute
        self._head: ResponseHead | None = None  # that nobody was told yet

    def head(self, head: ResponseHead) -> None:
        self._head = head

    def data(self, data: bytes, is_last: bool) -> None:
        head = self._head
        if head is None:
            self._receiver.data(data, is_last)
        elif _is_failed(head, data):
            if not is_last and self._call.answer is not None:
                self._call.answer.cancel()
            self._call.prefill.not_pulled()
            self._compute()
        elif data or is_last:
            self._head = None
            self._receiver.head(head)
            self._receiver.data(data, is_last)

    def failed(self, failure: Failure) -> None:
        self._receiver.failed(failure)


class PrefillBeside(Upstream):
    def __init__(self, prefill: PrefillLeg, answering: PreparedRequest, room: int, failed: PeerFailed) -> None:
        """`failed` is told if the prefill fails before the answer has begun, and whether its server was lost."""
        self._prefill = prefill
        self._answering = answering
        self._failed = failed
        replica = prefill.replica
        self._with_room = partial(
            handover.with_room, host=replica.upstream.host, port=replica.bootstrap_port, room=room
        )
        self.clock = answering.clock

    def send(self, method: bytes, target: bytes, headers: bytes, body: bytes, receiver: Receiver) -> Call:
        call = _BothLegs(self, receiver, self._prefill)
        answer = _Answer(receiver, call)

        def prefilled(outcome: Outcome, _: bytes) -> None:
            if outcome is not Outcome.HANDED_OVER and not answer.has_begun:
                self._failed(self._prefill.is_lost)
            else:
                answer.release()

        self._prefill.begin(target, self._with_room(self._prefill.body), prefilled)
        way = self._answering.with_body(self._with_room(self._answering.body))
        call.answer = way.send(method, target, headers, body, answer)
        return call


class _Answer:
    """Receiver of the answer to a request whose prompt is computed elsewhere meanwhile. An error that is answered while
    that goes on is held back: if the prefill fails too, it was the cause."""

    __slots__ = ("_call", "_held", "_is_whole", "_receiver", "_status", "has_begun")

    def __init__(self, receiver: Receiver, call: _BothLegs) -> None:
        self._receiver = receiver
        self._call = call
        self._status = 0
        self._held: tuple[ResponseHead, bytes] | None = None  # that nobody was told yet
        self._is_whole = False  # all of what is held has come
        self.has_begun = False  # the client's answer has

    def head(self, head: ResponseHead) -> None:
        self._status, self._held = head.status, (head, b"")

    def data(self, data: bytes, is_last: bool) -> None:
        if self._held is None:
            self._pass_on(data, is_last)
            return
        head, body = self._held[0], self._held[1] + data
        self._held, self._is_whole = (head, body), is_last
        if _is_failed(head, body) and self._call.prefill.is_running:
            if is_last:
                self._call.upstream.clock.call_later(_DOUBT_S, self.release)
        elif body or is_last:
            self.release()

    def failed(self, failure: Failure) -> None:
        self._call.prefill.cancel()
        self._receiver.failed(failure)

    def release(self) -> None:
        """The held answer is the client's, unless the request was given up meanwhile."""
        if self._held is not None and self._call.receiver is not None:
            (head, body), self._held = self._held, None
            self._receiver.head(head)
            self._pass_on(body, self._is_whole)

    def _pass_on(self, data: bytes, is_last: bool) -> None:
        if data or is_last:
            self.has_begun = True
        if is_last and self._status != 200:
            self._call.prefill.cancel()
        self._receiver.data(data, is_last)
