"""A decision log, gone through once: each choice is put to every other policy, each outcome to the estimates.

    replay = Replay({"round_robin": RoutingSettings("round_robin")})
    replay.read(read_entries(path))
    report(replay)

Memory is bounded by the requests that are open at a time and a few numbers for each that ended.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from math import nan
from typing import NamedTuple

from penstock.core.replica import ReplicaSnapshot
from penstock.gateway.records.decisions import Decided, Ended
from penstock.replay.estimate import Times
from penstock.replay.policy import OtherPolicy, Parts, Shown, as_recorded, parts, recorded_choice, unexplained
from penstock.replay.world import World
from penstock.router.router import Choice
from penstock.router.strategies import RoutingSettings


class Pick(NamedTuple):
    """The replica that a policy chose, and what can be expected of it."""

    replica: ReplicaSnapshot
    parts: Parts
    reused_tokens: int
    choice: Choice
    shown: Shown


class Change(NamedTuple):
    """A request that would have gone elsewhere."""

    decided: Decided
    recorded: Pick
    other: Pick
    ended: Ended

    @property
    def gain_s(self) -> float:
        return self.recorded.parts.total_s - self.other.parts.total_s


@dataclass
class Tally:
    """The tally of one policy, the recorded one included."""

    num_same: int = 0  # as recorded, of choices among several
    requests: Counter[str] = field(default_factory=Counter)  # by replica
    computed: Counter[str] = field(default_factory=Counter)  # prompt tokens, by replica
    reused_tokens: int = 0
    times: Times = field(default_factory=Times)  # of requests that ended, with one choice, in the order of their ends
    same: array[int] = field(default_factory=lambda: array("b"))  # of the same requests, whether it is as recorded
    changes: list[tuple[float, int, Change]] = field(default_factory=list)  # a heap: the largest

    def picked(self, pick: Pick) -> None:
        self.requests[pick.replica.id] += 1
        self.computed[pick.replica.id] += pick.shown.request.prompt_tokens - pick.reused_tokens
        self.reused_tokens += pick.reused_tokens


class _Open(NamedTuple):
    decided: Decided
    recorded: Pick
    others: list[Pick]


class Replay:
    """`carries`: what a policy would have done differently changes what it is shown later."""

    def __init__(
        self,
        policies: Mapping[str, RoutingSettings],
        *,
        carries: bool = False,
        model: str | None = None,
        num_changes: int = 10,
    ) -> None:
        self.carries, self._model, self._num_changes = carries, model, num_changes
        self._policies = [OtherPolicy(routing, carries=carries) for routing in policies.values()]
        self._as_it_was = World()
        self._worlds = [self._as_it_was, *(policy.world for policy in self._policies if policy.world is not None)]
        self._open: dict[str, _Open] = {}
        self._sent_on: set[str] = set()
        self._order = count()
        self.others = {name: Tally() for name in policies}
        self.recorded = Tally()
        self.models: Counter[str] = Counter()
        self.strategies: Counter[str] = Counter()
        self.first_s, self.last_s = nan, nan
        self.num_choices = self.num_free = self.num_sent_on = self.num_cut = self.num_hashed = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0  # as replicas told, of requests that ended
        self._missing = self._computed = 0  # tokens of prompts of which replicas said how much they held
        self.waited, self.measured = array("d"), array("d")
        self._guessed: list[str] = []  # of the same requests, the model if no speed was known; else ""
        self._timed_models: set[str] = set()

    @property
    def num_requests(self) -> int:
        return self.num_choices - self.num_sent_on

    def by_guess(self) -> list[bool]:
        """Returns for each that ended whether it came before the first speed of its model was measured: its seconds
        would be in another unit than those of all who came later. Where none ever is, all are in the same."""
        return [model in self._timed_models for model in self._guessed]

    def read(self, entries: Iterable[Decided | Ended]) -> Replay:
        for entry in entries:
            self.take(entry)
        return self

    def take(self, entry: Decided | Ended) -> None:
        if isinstance(entry, Ended):
            self._ended(entry)
        elif entry.picked is not None and self._model in (None, entry.model):
            self._decided(entry)

    # -- inside

    def _decided(self, decided: Decided) -> None:
        now = self.last_s = decided.at_s if self.num_choices == 0 else max(self.last_s, decided.at_s)
        self._count(decided)
        shown = as_recorded(decided)
        recorded = _pick(recorded_choice(decided, shown), shown)
        if not shown.is_by_guess:
            self._timed_models.add(decided.model)
        for replica, hashes in unexplained(shown, self._as_it_was):
            for world in self._worlds:
                world.seen(replica, hashes, now, shown.request.block_tokens)
        others, really = [], self._really_missing()
        for policy, tally in zip(self._policies, self.others.values(), strict=True):
            theirs = policy.shown(shown, self._as_it_was, now)
            pick = _pick(policy.choose(theirs, decided.dropped, now, really), theirs)
            tally.picked(pick)
            tally.num_same += len(decided.candidates) > 1 and pick.replica.id == decided.picked
            others.append(pick)
        self._as_it_was.sent(shown.request, recorded.replica, really * shown.missing_tokens(recorded.replica), now)
        self.recorded.picked(recorded)
        self._open[decided.id] = _Open(decided, recorded, others)

    def _count(self, decided: Decided) -> None:
        if self.num_choices == 0:
            self.first_s = decided.at_s
        self.num_choices += 1
        self.num_free += len(decided.candidates) > 1
        self.num_cut += decided.num_candidates > len(decided.candidates)
        self.num_hashed += bool(decided.hashes)
        self.prompt_tokens += decided.prompt_tokens
        self.models[decided.model] += 1
        self.strategies[decided.strategy] += 1
        if decided.id in self._open:
            self.num_sent_on += 1
            self._sent_on.add(decided.id)

    def _ended(self, ended: Ended) -> None:
        """Takes the end of a request. One that was sent on is left out: nobody can tell which choice its time is of."""
        found = self._open.pop(ended.id, None)
        if found is None:
            return
        for world in self._worlds:
            world.ended(ended.id)
        if ended.id in self._sent_on:
            self._sent_on.remove(ended.id)
            return
        self.cached_tokens += ended.cached_tokens
        if ended.cached_tokens:
            self._missing += found.recorded.shown.missing_tokens(found.recorded.replica)
            self._computed += ended.input_tokens - ended.cached_tokens
        self.waited.append(ended.queue_s or 0.0)
        self.measured.append(nan if ended.ttft_s is None else ended.ttft_s)
        self._guessed.append(found.decided.model if found.recorded.shown.is_by_guess else "")
        self.recorded.times.append(found.recorded.parts)
        for tally, pick in zip(self.others.values(), found.others, strict=True):
            tally.times.append(pick.parts)
            tally.same.append(is_same := pick.replica.id == found.recorded.replica.id)
            if not is_same:
                self._keep(tally, Change(found.decided, found.recorded, pick, ended))

    def _really_missing(self) -> float:
        """A replica holds more of a prompt than a gateway knows: parts of blocks, and all where nobody looked."""
        return min(1.0, self._computed / self._missing) if self._missing else 1.0

    def _keep(self, tally: Tally, change: Change) -> None:
        heapq.heappush(tally.changes, (abs(change.gain_s), next(self._order), change))
        if len(tally.changes) > self._num_changes:
            heapq.heappop(tally.changes)


def _pick(choice: Choice, shown: Shown) -> Pick:
    assert choice.replica is not None  # of a choice that was made, somebody was a candidate
    return Pick(choice.replica, parts(shown, choice.replica), shown.matched_tokens(choice.replica), choice, shown)
