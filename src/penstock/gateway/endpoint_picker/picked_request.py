"""One request that Envoy sends: a shell of its journey, from the pick to the end of Envoy's stream.

It counts at its replica from the pick on, so that the next pick knows of it; the response is seen as Envoy passes it
by, and what it used is read from its end. Where Envoy has gone to another endpoint than the first, it counts there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from penstock.api import relay, server_timing
from penstock.dialects.usage import StreamTally
from penstock.gateway.endpoint_picker.endpoints import Endpoints
from penstock.gateway.endpoint_picker.pick_exchange import Destination, HeaderPairs, PickExchange, header_pairs
from penstock.gateway.proxy import journey as on
from penstock.gateway.proxy import refusals
from penstock.gateway.proxy.journey import Actions, Charge, Journey, State
from penstock.gateway.proxy.journey_shell import JourneyShell, SizedRequest
from penstock.gateway.proxy.proxied_request import ProxyServices
from penstock.gateway.proxy.replica_attempt import ReplicaAttempt, is_replicas_fault
from penstock.gateway.records.accounting import RequestAccounting
from penstock.gateway.records.facts import Ending
from penstock.gateway.records.token_usage import NO_TOKENS, TokenUsage, find_usage
from penstock.health.retries import RetryBudget
from penstock.http.forward import End, Outcome
from penstock.router.router import Choice

_NO_RETRIES = RetryBudget(most=0.0)  # another try is Envoy's to make
_TAIL_BYTES = 16 << 10
_SERVER_TIMING = server_timing.HEADER.decode()
_RELAY_HEADERS = (  # the words of a gateway, which a replica believes if it is shown its secret: none are a client's
    relay.HEADER,
    relay.WHOLE_HEADER,
    relay.NAMESPACE_HEADER,
    relay.TENANT_HEADER,
    relay.WATERMARK_HEADER,
    relay.SECRET_HEADER,
)


class PickedRequest(JourneyShell):
    """An `InFlightRequest` of the replica that Envoy sends it to."""

    def __init__(
        self,
        services: ProxyServices,
        endpoints: Endpoints,
        max_fallbacks: int,
        exchange: PickExchange,
        sized: SizedRequest,
    ) -> None:
        journey = Journey(_NO_RETRIES, has_fallbacks=sized.chain is not None)
        super().__init__(sized, journey, RequestAccounting(services.accounting, sized.routed, None))
        self.is_stream = bool(sized.routed.view.stream)
        self._services = services
        self._endpoints = endpoints
        self._max_fallbacks = max_fallbacks
        self._exchange = exchange
        self._body = sized.body
        self._attempt: ReplicaAttempt | None = None
        self._tally = StreamTally()
        self._tail = b""
        self._status = 0
        self._is_passed_on = False  # the response counts as an answer: no proxy would have tried another replica
        self._num_bytes = 0
        self._sent_at = 0.0
        self._served_by = ""  # the replica's id
        self._first_at: float | None = None

    def begin(self) -> None:
        self._exchange.watcher = self
        self._run(self._journey.begin(has_limits=False))

    def _run(self, actions: Actions) -> None:
        for action in actions:
            if (run := _RUN.get(type(action))) is not None:  # all others are for a proxy to do
                run(self, action)

    # -- in

    def _submit(self, _: on.Submit) -> None:
        self._services.queue.submit(self)

    def held(self) -> None:
        """Envoy waits: nothing can be written to its client meanwhile."""

    def _fall_back(self, action: on.FallBack) -> None:
        """On to the next model of the chain: nothing was sent yet."""
        assert self._chain is not None
        move = self._chain.move(action.failure, self.request) if self._journey.legs == () else None
        if move is None:
            self._run(self._journey.has_no_fallback())
            return
        self._account.start_over(self.request, move.request.model, action.failure.value)
        self.request, self._size, self._body = move.request, move.size, move.body
        self._run(self._journey.fell_back())

    def _send(self, action: on.Send) -> None:
        """The pick, and behind it the replicas that Envoy may fail over to."""
        assert self._choice is not None
        headers = self._headers_for(action.legs[0].replica) + header_pairs(self._count_at(action.legs[0].replica))
        endpoints = self._endpoints.named(self._ranked(self._choice)[: 1 + self._max_fallbacks])
        names = {name for name, _ in headers}
        removed = [name for name in _RELAY_HEADERS if name not in names]
        self._exchange.goes_to(Destination(endpoints, headers, removed, self._body, self))

    def _ranked(self, choice: Choice) -> list[str]:
        """Ids of the picked replica, of the other candidates by their scores, and of those that are full or cold."""
        assert choice.replica is not None
        by_score = sorted(zip(choice.totals, choice.candidates, strict=True), key=lambda pair: -pair[0])
        admission, now = self._services.upstream.admission, self._services.clock.now()
        usable, _ = admission.router.usable(self.request, admission.replicas(self.request.model), now)
        found = [choice.replica, *(one for _, one in by_score), *usable]
        return list(dict.fromkeys(one.id for one in found))

    def _headers_for(self, replica_id: str) -> list[tuple[str, bytes]]:
        """The secret of a replica that has one, and with it the request's class, which it believes then."""
        replica = self._services.upstream.replicas[replica_id]
        found = header_pairs(replica.headers_for(self._routed.caller.tenant))
        has_secret = any(name == relay.SECRET_HEADER for name, _ in found)
        return [(name, value) for name, value in found if has_secret and name in _RELAY_HEADERS and value]

    def _count_at(self, replica_id: str) -> bytes:
        """Counts the request at a replica from now on. Returns the headers of its trace."""
        self._sent_at, self._served_by = self._services.clock.now(), replica_id
        replica = self._services.upstream.replicas[replica_id]
        self._attempt = ReplicaAttempt(replica, self, self._sent_at, str(self.request.fingerprint))
        return self._account.timeline.sent(replica_id, self._sent_at)

    def _refuse(self, action: on.Refuse) -> None:
        self._exchange.reason = action.error.reason or action.error.code
        refusals.respond(self._exchange, self._routed.surface.convention, action.error, self.request.id)
        self._account.refused(action.error)

    # -- the response, as Envoy passes it by

    def answered(self, status: int, headers: Mapping[str, bytes], served: str | None) -> HeaderPairs:
        if self._journey.state is not State.SENT:
            return ()
        if served is not None:
            self._moved_to(self._endpoints.replica_at(served))
        self._status = status
        services, now = self._services, self._services.clock.now()
        self._is_passed_on = self._journey.head(status)
        if self._is_passed_on:
            self._account.timeline.answered(now, headers.get(_SERVER_TIMING, b""))
            services.upstream.admission.started(self.request.id, now)
        told = services.headers.of(self.request.id, self._choice, self._routed.caller.tenant)
        told = told.partition(b"\r\n")[2]  # the request's id is Envoy's to name
        if self._routed.ruling is not None:
            told += self._routed.ruling.header
        return header_pairs(told if self._chain is None else told + self._chain.header)

    def _moved_to(self, replica_id: str | None) -> None:
        """Envoy could not reach the first endpoint, and went to another one."""
        attempt, services = self._attempt, self._services
        if replica_id is None or attempt is None or replica_id == attempt.replica.id:
            return
        self._leave(is_blamed=True)
        others = frozenset(services.upstream.replicas) - {replica_id}
        now, admission = services.clock.now(), services.upstream.admission
        choice = admission.reroute(self.request.id, now, others, self.request.prompt_tokens)
        if choice is not None:
            self._choice = choice
            self._account.chose(self.request, choice)
        self._account.retried(self.request.model)
        self._count_at(replica_id)

    def data(self, chunk: bytes) -> None:
        if self._first_at is None and chunk:
            self._first_at = self._services.clock.now()
            if self._is_passed_on:
                self._journey.bytes_came()
        self._num_bytes += len(chunk)
        self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
        if self.is_stream:
            self._tally.append(chunk)

    def ended(self) -> None:
        """The response is complete."""
        if self._journey.state is not State.SENT:
            return
        if self._is_passed_on:
            self._leave(is_blamed=False)
            self._run(self._journey.completed(self._status))
            return
        self._leave(is_replicas_fault(self._outcome(End.DECLINED)), is_doubtful=True)
        self._run(self._journey.declined(self._status, None, is_lost=False, num_tokens=0, is_resumable=False))

    # -- the client

    def client_gone(self) -> None:
        """Envoy's stream ended before the response did: its client, or Envoy, gave it up."""
        has_all = self._routed.surface.last_event in self._tail  # many do not wait for the end in form
        self._leave(is_blamed=None)
        self._run(self._journey.client_gone(has_all=has_all))

    def pause(self) -> None:
        """Nothing is being written."""

    resume = pause

    def id_to_move(self) -> str | None:
        return None

    def replica_lost(self) -> None:
        """Envoy holds the connection, and is the one to end it."""

    # -- out

    def _outcome(self, end: End) -> Outcome:
        now = self._services.clock.now()
        first_byte_s = None if self._first_at is None else self._first_at - self._sent_at
        return Outcome(end, self._status or None, self._num_bytes, first_byte_s, now - self._sent_at, self._tail)

    def _leave(self, is_blamed: bool | None, *, is_doubtful: bool = False) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None and attempt.end(is_blamed, self._services.clock.now(), is_doubtful=is_doubtful):
            self._services.upstream.replicas.changed(attempt.replica)

    def _usage(self, charge: Charge) -> TokenUsage | None:
        if charge not in (Charge.WHOLE, Charge.SEEN, Charge.PART):
            return None
        if not self._routed.surface.is_metered:
            return NO_TOKENS
        found = find_usage(self._tail) if self._status == 200 else None
        prompt = self._size.prompt
        if found is None:
            return TokenUsage(prompt, self._tally.output_tokens if self.is_stream else self._size.most_used[1])
        if not found.input_tokens:
            return replace(found, input_tokens=prompt)
        self._size.learn(found.input_tokens)
        return found

    def _settle(self, end: on.Settle) -> None:
        self._exchange.watcher = None
        if self._chain is not None:
            self._chain.close()
        usage = self._usage(end.charge)
        if usage is not None and self.is_stream and end.charge is Charge.WHOLE:
            upstream = self._services.upstream
            if (replica := upstream.replicas.get(self._served_by)) is not None:
                upstream.snapshots.answered(replica, usage, self._outcome(End.COMPLETED))
        self._account.close(self.request, usage, end.ending, end.reason)
        if end.ending is Ending.OK and self._routed.surface.is_metered:
            self._services.shadows.mirror(self._routed, self.request.version, self._size.output)


_RUN: dict[type[on.Action], Callable[[PickedRequest, Any], None]] = {
    on.Submit: PickedRequest._submit,
    on.FallBack: PickedRequest._fall_back,
    on.Send: PickedRequest._send,
    on.Refuse: PickedRequest._refuse,
    on.Settle: PickedRequest._settle,
}
