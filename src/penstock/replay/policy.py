"""A policy that is asked what it would have chosen: the real router, shown what a log says was known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from penstock.admission.shares import blocked_by
from penstock.core.replica import ReplicaSnapshot
from penstock.gateway.records.decisions import Decided
from penstock.health.reports import GUESSED_SPEED
from penstock.replay.world import Load, World
from penstock.router.load import saved_tokens
from penstock.router.prefix_index import PrefixIndex
from penstock.router.request import EdgeRequest
from penstock.router.router import Choice, Router
from penstock.router.sticky import session_bucket
from penstock.router.strategies import RoutingSettings

# What the scarce number of a replica is at least, when it has no room for a request.
_FULL: dict[str, Callable[[ReplicaSnapshot, Load], dict[str, int]]] = {
    "prefill": lambda last, was: {"queued_tokens": max(last.limits.chunk_tokens, was.prefill_tokens)},
    "sequences": lambda last, was: {"num_waiting": max(0, last.max_sequences - last.load.num_running)},
    "kv": lambda last, was: {"kv_active_tokens": last.limits.kv_capacity_tokens},
}


class Shown(NamedTuple):
    """Facts for a policy: a request, those that could take it, and how many of its first blocks each holds."""

    request: EdgeRequest
    replicas: Sequence[ReplicaSnapshot]
    matched: Mapping[str, int]
    full: Mapping[str, str] = {}  # those that had no room, with what they had too little of
    on_host: Mapping[str, int] = {}  # of the blocks that each holds, in its host memory only

    def matched_tokens(self, replica: ReplicaSnapshot) -> int:
        return self.request.tokens_of(self.matched.get(replica.id, 0))

    def host_tokens(self, replica: ReplicaSnapshot) -> int:
        return min(self.matched_tokens(replica), self.on_host.get(replica.id, 0) * self.request.block_tokens)

    def missing_tokens(self, replica: ReplicaSnapshot) -> int:
        """Those that it could compute while it fetches others from its host memory included."""
        blocks = self.matched.get(replica.id, 0)
        on_host = min(blocks, self.on_host.get(replica.id, 0))
        return self.request.prompt_tokens - saved_tokens(self.request, replica, blocks, on_host)

    @property
    def is_by_guess(self) -> bool:
        """Nobody has measured how fast it is: the fleet is new, or of a kind that never tells."""
        return all(replica.prefill_tokens_per_s == GUESSED_SPEED for replica in self.replicas)


class Parts(NamedTuple):
    """Parts of the time to a first token, as the router expects it: behind others, and for the prompt itself."""

    queue_s: float
    prefill_s: float

    @property
    def total_s(self) -> float:
        return self.queue_s + self.prefill_s


def parts(shown: Shown, replica: ReplicaSnapshot) -> Parts:
    return Parts(replica.queue_s, shown.missing_tokens(replica) / replica.prefill_tokens_per_s)


def as_recorded(decided: Decided) -> Shown:
    # As of the moment of the choice: how old the numbers were decided who is among the candidates, and is over.
    replicas = [seen.snapshot(decided.model, decided.at_s + seen.age_s) for seen in decided.candidates]
    request = decided.request()
    if not request.random01:  # of a log from before draws were kept
        request = replace(request, random01=session_bucket(decided.id))
    matched = {seen.id: seen.matched for seen in decided.candidates if seen.matched}
    full = {name: why for name, why in decided.dropped.items() if why in _FULL}
    on_host = {seen.id: seen.on_host for seen in decided.candidates if seen.on_host}
    return Shown(request, replicas, matched, full, on_host)


def recorded_choice(decided: Decided, shown: Shown) -> Choice:
    """Returns the recorded choice with the scores that it was made by."""
    picked = next(replica for replica in shown.replicas if replica.id == decided.picked)
    return Choice(
        picked,
        shown.replicas,
        {name: [seen.scores[at] for seen in decided.candidates] for at, name in enumerate(decided.scorers)},
        [seen.total for seen in decided.candidates],
        decided.dropped,
        decided.strategy,
        shown.matched,
        shown.matched_tokens(picked),
        decided.is_approximate,
        shown.on_host,
        shown.host_tokens(picked),
        shown.request.prompt_tokens - shown.missing_tokens(picked),
    )


class OtherPolicy:
    """Another policy than the log's. With `carries` it is shown what it would have done differently before, too."""

    def __init__(self, routing: RoutingSettings, *, carries: bool = False) -> None:
        self._index = PrefixIndex(predicted_s=0.0)  # a log tells who holds what, predictions included
        self._router = Router(routing.build(self._index), filters=(), index=self._index)
        self.world = World() if carries else None
        self._last: dict[str, ReplicaSnapshot] = {}

    def shown(self, recorded: Shown, as_it_was: World, now: float) -> Shown:
        """Returns what the log says, with what differs by now: those without room may have it, and the reverse."""
        if self.world is None:
            return recorded
        request, known = recorded.request, {replica.id for replica in recorded.replicas}
        replicas = [*recorded.replicas, *self._full(recorded, as_it_was, now)]
        self._last.update((replica.id, replica) for replica in recorded.replicas)
        there, here = as_it_was.held(request, replicas), self.world.held(request, replicas)
        matched, free, all_of_them = {}, [], []
        for replica in replicas:
            blocks = here.get(replica.id, 0)
            if replica.id in known:
                blocks += recorded.matched.get(replica.id, 0) - there.get(replica.id, 0)
            matched[replica.id] = max(0, min(blocks, len(request.hashes)))
            was, would = as_it_was.load(replica, now), self.world.load(replica, now)
            sequences, prefill_tokens, kv_tokens = (other - own for other, own in zip(would, was, strict=True))
            replica = replica.with_sent(replica.sent_sequences + sequences, prefill_tokens, kv_tokens)
            all_of_them.append(replica)
            on_host = min(matched[replica.id], recorded.on_host.get(replica.id, 0))
            saved = saved_tokens(request, replica, matched[replica.id], on_host)
            if self._has_room(request, replica, saved) if would != was else replica.id in known:
                free.append(replica)
        if not free:  # it waits at the gateway for the first that has; the wait is part of that one's time
            free = [min(all_of_them, key=lambda replica: replica.queue_s)]
        return Shown(request, free, matched, on_host=recorded.on_host)

    def _full(self, recorded: Shown, as_it_was: World, now: float) -> list[ReplicaSnapshot]:
        """Returns the replicas that had no room as they were last seen, but full."""
        return [
            replace(last, load=replace(last.load, **_FULL[why](last, as_it_was.load(last, now))))
            for name, why in recorded.full.items()
            if (last := self._last.get(name)) is not None
        ]

    def _has_room(self, request: EdgeRequest, replica: ReplicaSnapshot, saved: int) -> bool:
        """Whether the replica has room, as admission has it."""
        saved = saved if self._router.goes_by_prefixes(request.model) else 0
        return not replica.sequences or blocked_by(request, replica, 1.0, 0.0, saved) is None

    def choose(self, shown: Shown, dropped: dict[str, str], now: float, really: float = 1.0) -> Choice:
        """`really`: of the tokens that seem to be missing at a replica, the share that really is."""
        request = shown.request
        for replica in shown.replicas:
            held = request.hashes[: shown.matched.get(replica.id, 0)]
            self._index.reset(replica.id, held)
            if on_host := shown.on_host.get(replica.id, 0):
                self._index.stored_on_host(replica.id, held[-on_host:])
        there = {replica.id for replica in shown.replicas}
        dropped = {name: why for name, why in dropped.items() if name not in there}
        choice = self._router.pick_among(request, shown.replicas, now, dropped)
        self._router.routed(request, choice, now)
        if self.world is not None and choice.replica is not None:
            self.world.sent(request, choice.replica, really * shown.missing_tokens(choice.replica), now)
        return choice


def unexplained(recorded: Shown, as_it_was: World) -> list[tuple[ReplicaSnapshot, Sequence[int]]]:
    """Returns what replicas hold though nobody in the log sent it there: it was there before, whatever the policy."""
    known = as_it_was.held(recorded.request, recorded.replicas)
    return [
        (replica, recorded.request.hashes[:blocks])
        for replica in recorded.replicas
        if (blocks := recorded.matched.get(replica.id, 0)) > known.get(replica.id, 0)
    ]
