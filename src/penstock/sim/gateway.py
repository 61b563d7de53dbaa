"""The gateway's side: the real admission, router, index and health, told of replicas as a gateway hears of them.

A report comes when something changed, at most every 50 ms, and every 250 ms anyway; news of what the caches hold come
with it. A request's life is the gateway's own `journey`. Nothing here tokenizes, limits or bills, no client leaves, no
request is suspected of having killed its replica, and one that finds no other replica does not wait for one.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from penstock.admission.admission import Admission, Used
from penstock.admission.decision import Admit, Decision, Shed
from penstock.admission.settings import AdmissionSettings
from penstock.core.errors import Overloaded
from penstock.core.hashing import ROUTING_TOKENS
from penstock.core.replica import KV_PULL_TOKENS_PER_S, ReplicaSnapshot, ReplicaState
from penstock.core.request import TokenEvent
from penstock.core.slo import Slo
from penstock.core.tiers import Tier
from penstock.gateway.proxy.journey import (
    Actions,
    Journey,
    Leg,
    Pick,
    Role,
    Send,
    SendLater,
    Settle,
    Strand,
    Submit,
)
from penstock.gateway.proxy.journey_shell import leg_of
from penstock.gateway.records.facts import Ending
from penstock.health.replica_health import ReplicaHealth
from penstock.health.reports import GUESSED_SPEED, decode_speed, host_share
from penstock.health.retries import RetryBudget
from penstock.health.speeds import Speeds
from penstock.router.learning import OutputLengths
from penstock.router.legs import Split
from penstock.router.prefix_index import PrefixIndex
from penstock.router.request import EdgeRequest
from penstock.router.router import Choice, Router
from penstock.router.routes import Failure
from penstock.router.strategies import RoutingSettings
from penstock.sim.events import Events
from penstock.sim.flight import Ask, Flight
from penstock.sim.replica import SimReplica
from penstock.sim.sim_prompts import TokenRun, as_request

Chosen = Callable[[Flight, Choice, float], None]

MODEL = "m"
_REPORT_S = 0.05
_MAX_SILENT = 5  # reports that may be left out while nothing changes
_POLL_S = 0.05
_OK = 200
_GOLDEN = 0.6180339887498949
_MIN_LIMIT = 1024  # tokens of output that a client allows at least, as most do
_MIN_DRAW = 2.0**-53  # with none at all, a decision log is taken for one of before draws were kept


class Followed:
    """A replica and what the gateway thinks of it."""

    __slots__ = ("drains", "health", "is_gone", "last", "replica", "riders", "silent", "speaks")

    def __init__(self, replica: SimReplica) -> None:
        self.replica = replica
        self.health = ReplicaHealth()
        self.riders: dict[int, Flight] = {}
        self.last = replica.measured()
        self.silent = 0
        self.speaks = True  # False: its process is gone
        self.drains = False
        self.is_gone = False  # nobody follows it any more


class SimGateway:
    def __init__(
        self,
        events: Events,
        routing: RoutingSettings,
        ended: Callable[[Flight], None],
        *,
        admission: AdmissionSettings | None = None,
        publishes: bool = True,
        split: Split = "auto",
        slo: Slo | None = None,
        chosen: Chosen | None = None,
    ) -> None:
        """`ended` is told of every request once, `chosen` of every time that one is sent to a replica; without
        `publishes` nobody says what is in the caches."""
        index = PrefixIndex()
        self.index = index
        router = Router(routing.build(index), index=index, splits={MODEL: split})
        self.admission = Admission(router, admission, slos={MODEL: slo or Slo()})
        self.followed: dict[str, Followed] = {}
        self.num_flights = 0
        self.num_open = 0
        self._events = events
        self._ended = ended
        self._chosen = chosen
        self._publishes = publishes
        self._by_prefix = self.admission.router.goes_by_prefixes(MODEL)
        self._lengths = OutputLengths()
        self._speeds = Speeds()
        self._retries = RetryBudget()
        self._flights: dict[str, Flight] = {}
        self._waiting: dict[str, Flight] = {}
        self._is_polling = False

    # -- replicas

    def follow(self, replica: SimReplica, phase: float) -> None:
        """Follows a replica from now on; `phase` in [0, 1) is where between two reports it is."""
        followed = self.followed[replica.name] = Followed(replica)
        if self._publishes:
            self.index.reset(replica.name, ())
        self._heard(followed)
        self._events.after(phase * _REPORT_S, self._look, followed)

    def lost(self, name: str) -> None:
        """Its process is gone, and its connections with it."""
        followed = self.followed[name]
        followed.speaks = False
        self._speeds.forget(name)
        self.index.forget(name)
        self.admission.replica_changed(replace(self._snapshot(followed), state=ReplicaState.OUT))
        self._send_riders_away(followed)

    def back(self, name: str) -> None:
        """Another process has its name, with nothing in its cache."""
        followed = self.followed[name]
        followed.speaks, followed.last = True, followed.replica.measured()
        followed.health.mark(replace(self._snapshot(followed), state=ReplicaState.OUT), self._events.now)
        if self._publishes:
            self.index.reset(name, ())

    def drain(self, name: str) -> None:
        self.followed[name].drains = True
        self._heard(self.followed[name])

    def undrain(self, name: str) -> None:
        self.followed[name].drains = False
        self._heard(self.followed[name])

    def remove(self, name: str) -> None:
        """Nobody is left there, and nobody comes again."""
        followed = self.followed.pop(name)
        followed.is_gone = True
        self._speeds.forget(name)
        self.index.forget(name)
        self.admission.replica_gone(name)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def _look(self, followed: Followed) -> None:
        if followed.is_gone:
            return
        self._events.after(_REPORT_S, self._look, followed)
        if not followed.speaks:
            return
        measured = followed.replica.measured()
        followed.silent += 1
        if measured != followed.last or followed.silent >= _MAX_SILENT:
            followed.last, followed.silent = measured, 0
            self._heard(followed)

    def _heard(self, followed: Followed) -> None:
        now, replica = self._events.now, followed.replica
        news = replica.news.take()
        if self._publishes and self._by_prefix:
            if news[Tier.DEVICE]:
                self.index.stored(replica.name, news[Tier.DEVICE])
            if news[Tier.HOST]:
                self.index.stored_on_host(replica.name, news[Tier.HOST])
            if news[None]:
                self.index.removed(replica.name, news[None])
        is_lost = followed.health.hangs(followed.last, now)
        self.admission.replica_changed(self._snapshot(followed))
        if is_lost:
            self._send_riders_away(followed)
        if self._waiting:
            self._decide()

    def _snapshot(self, followed: Followed) -> ReplicaSnapshot:
        """Returns the snapshot that the gateway makes of a report."""
        now, name, measured = self._events.now, followed.replica.name, followed.last
        return followed.health.mark(
            ReplicaSnapshot(
                id=name,
                models=(MODEL,),
                taken_at=now,
                limits=measured.limits,
                load=measured.load,
                prefill_tokens_per_s=self._speeds.seen(name, measured.speeds.prefill_tokens_per_s, GUESSED_SPEED),
                decode_tokens_per_s=decode_speed(measured),
                host_share=host_share(measured.speeds),
                role=followed.replica.role,
                kv_address=name if followed.replica.transfer is not None else "",
                kv_layout=followed.replica.profile.name,
                kv_pull_tokens_per_s=measured.speeds.kv_pull_tokens_per_s or KV_PULL_TOKENS_PER_S,
                state=ReplicaState.DRAINING if followed.drains else ReplicaState.READY,
            ),
            now,
        )

    def _send_riders_away(self, followed: Followed) -> None:
        riders, followed.riders = list(followed.riders.values()), {}
        for flight in riders:
            self._move(flight, followed)

    def _move(self, flight: Flight, left: Followed) -> None:
        """Takes a request from the replica it was at: what its client has stays; the rest is made elsewhere."""
        replica, request_id = left.replica, flight.request.id
        if replica.has(request_id):
            if flight.journey.is_begun:
                flight.generated = max(flight.generated, replica.num_generated(request_id))
            if left.speaks:
                replica.abort(request_id)
        flight.moves += 1
        if flight.generated >= flight.ask.output_tokens:
            self._run(flight, flight.journey.completed(_OK))  # its last token was on the way
        else:
            self._run(flight, flight.journey.failed(is_lost=False, num_tokens=0, is_resumable=True))

    # -- requests

    def submit(self, ask: Ask) -> Flight:
        flight = self._new_flight(ask)
        self._retries.earn()
        self._run(flight, flight.journey.begin(has_limits=False))
        return flight

    def place(self, ask: Ask, replica: str) -> Flight:
        """Places a request at once, whatever admission would say: the next is placed by what this one makes of it."""
        flight, followed = self._new_flight(ask), self.followed[replica]
        flight.journey.admitted(Leg(Role.WHOLE, replica))
        flight.replica = replica
        followed.riders[flight.number] = flight
        self._arrive(flight, followed)
        return flight

    def _new_flight(self, ask: Ask) -> Flight:
        request = self._edge_request(ask, self.num_flights)
        flight = Flight(ask, self.num_flights, request, Journey(self._retries))
        self.num_flights += 1
        self.num_open += 1
        self._flights[flight.request.id] = flight
        return flight

    def _edge_request(self, ask: Ask, number: int) -> EdgeRequest:
        limit = max(ask.output_tokens, _MIN_LIMIT)
        run = TokenRun(number, ask.prompt_tokens, ask.names, ROUTING_TOKENS)
        return EdgeRequest(
            id=str(number),
            model=MODEL,
            prompt_tokens=ask.prompt_tokens,
            max_tokens=limit,
            tenant=ask.tenant,
            priority=ask.priority,
            session=ask.session,
            random01=number * _GOLDEN % 1.0 or _MIN_DRAW,
            context_tokens=ask.prompt_tokens + ask.output_tokens,
            hashes=run.routing_hashes() if self._by_prefix else (),
            expected_output=self._lengths.expected(ask.tenant, MODEL, limit),
        )

    def _run(self, flight: Flight, actions: Actions) -> None:
        journey = flight.journey
        for action in actions:
            match action:
                case Submit():
                    self._decided(flight, self.admission.submit(flight.request, self._events.now))
                case Send(legs):
                    self._send(flight, legs[0])
                case Pick():
                    self._pick(flight)
                case SendLater(legs):
                    self._run(flight, journey.backed_off(legs))
                case Strand():
                    self._run(flight, journey.waited_enough())
                case Settle(ending=ending):
                    self._close(flight, ending)

    def _decided(self, flight: Flight, decision: Decision) -> None:
        if isinstance(decision, Admit):
            self._chose(flight, decision.choice)
            self._run(flight, flight.journey.admitted(leg_of(decision.choice)))
        elif isinstance(decision, Shed):
            flight.shed = decision.reason.value
            self._run(flight, flight.journey.shed(Failure.ERROR, Overloaded(flight.shed)))
        else:
            self._waiting[flight.request.id] = flight
            if not self._is_polling:
                self._is_polling = True
                self._events.after(_POLL_S, self._poll)

    def _poll(self) -> None:
        self._is_polling = False
        self._decide()
        if self._waiting:
            self._is_polling = True
            self._events.after(_POLL_S, self._poll)

    def _decide(self) -> None:
        for decision in self.admission.poll(self._events.now):
            flight = self._waiting.pop(decision.request.id, None)
            if flight is not None:
                self._decided(flight, decision)

    def _pick(self, flight: Flight) -> None:
        journey, known_tokens = flight.journey, flight.ask.prompt_tokens + flight.generated
        avoid, is_begun = frozenset(journey.tries.replicas), journey.is_begun
        choice = self.admission.reroute(flight.request.id, self._events.now, avoid, known_tokens, is_begun=is_begun)
        if choice is None or choice.replica is None:
            self._run(flight, journey.picked(None))
        else:
            self._chose(flight, choice)
            self._run(flight, journey.picked(leg_of(choice)))

    def _chose(self, flight: Flight, choice: Choice) -> None:
        if self._chosen is not None:
            self._chosen(flight, choice, self._events.now)

    def _send(self, flight: Flight, leg: Leg) -> None:
        followed = self.followed[leg.replica]
        flight.replica, flight.kv_source = leg.replica, leg.source
        followed.riders[flight.number] = flight
        self._events.after(followed.replica.profile.request_s, self._arrive, flight, followed)

    def _arrive(self, flight: Flight, followed: Followed) -> None:
        if flight.number not in followed.riders:
            return  # lost on the way, and sent elsewhere
        ask, replica = flight.ask, followed.replica
        run = TokenRun(flight.number, ask.prompt_tokens, ask.names, replica.profile.block_tokens)
        replica.submit(
            as_request(
                flight.request.id,
                run,
                ask.output_tokens,
                ask.priority,
                flight.generated,
                ask.tenant,
                flight.kv_source,
            )
        )

    def token(self, replica: SimReplica, event: TokenEvent) -> None:
        flight = self._flights.get(event.request_id)
        followed = self.followed[replica.name]
        if flight is None or flight.number not in followed.riders:
            return
        now = self._events.now
        if flight.first_s is None or event.timings is not None:
            flight.journey.head(_OK)
            flight.journey.bytes_came()
            self.admission.started(event.request_id, now)
        if flight.first_s is None:
            flight.first_s = now
            flight.cached_tokens = event.cached_tokens or 0
        if event.finish is not None:
            del followed.riders[flight.number]
            flight.generated = flight.ask.output_tokens
            self._run(flight, flight.journey.completed(_OK))

    def _close(self, flight: Flight, ending: Ending) -> None:
        now, ask = self._events.now, flight.ask
        if ending is not Ending.OK:
            flight.shed = flight.shed or "lost"
        del self._flights[flight.request.id]
        self.num_open -= 1
        flight.ended_s = now
        if flight.shed:
            self.admission.finished(flight.request.id, now)
        else:
            self._lengths.learn(ask.tenant, MODEL, ask.output_tokens)
            self.admission.finished(flight.request.id, now, Used(ask.prompt_tokens, ask.output_tokens))
        self._ended(flight)
        if self._waiting:
            self._decide()
