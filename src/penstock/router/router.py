"""Filter, score, pick. Everything a policy may decide is in the lists it is made of; the loop knows none of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import nsmallest

import msgspec

from penstock.core.replica import ReplicaSnapshot
from penstock.core.slo import Slo
from penstock.router.filters import DEFAULT_FILTERS, Filter, narrowed, prefer_ready, prefer_warm
from penstock.router.legs import Alone, Held, Source, Split, can_pull, choose_source, moved_source
from penstock.router.load import saved_tokens
from penstock.router.pickers import least_worked
from penstock.router.prefix_index import PrefixIndex
from penstock.router.request import EdgeRequest
from penstock.router.strategies import RoutingSettings, Strategy

_NOBODY: Mapping[str, int] = {}
_MANY = 128  # candidates; more are not all scored
_HOLDERS, _IDLEST = 8, 16  # of very many replicas: how many of each kind are looked at as sources


class Choice(msgspec.Struct):
    """A pick and why: kept with the request, shown in the console, replayed against other policies."""

    replica: ReplicaSnapshot | None  # None: every replica was dropped
    candidates: Sequence[ReplicaSnapshot] = ()
    scores: dict[str, list[float]] = {}  # by scorer that had something to say, in the order of the candidates
    totals: list[float] = []
    dropped: dict[str, str] = {}  # replica id to reason
    strategy: str = ""
    matched: Mapping[str, int] = {}  # replica id to how many of the prompt's first blocks it holds
    matched_tokens: int = 0  # what the picked one holds of the prompt
    is_approximate: bool = False  # that is by what was sent there, or with events missing, not by what it says
    on_host: Mapping[str, int] = {}  # replica id to how many of the matched blocks are in its host memory only
    host_tokens: int = 0  # of `matched_tokens`, those
    saved_tokens: int = 0  # of `matched_tokens`, less what it takes to fetch those, in tokens computed meanwhile
    source: Source | None = None  # the second leg: where the picked one pulls KV blocks of the prompt from
    alone: Alone | None = None  # why there is none; None: there is, or it could not pull any


class Router:
    """One strategy for all models, or one for each that has its own; one index of who holds what for all of them."""

    def __init__(
        self,
        strategy: Strategy | None = None,
        by_model: Mapping[str, Strategy] | None = None,
        filters: Sequence[Filter] = DEFAULT_FILTERS,
        index: PrefixIndex | None = None,
        splits: Mapping[str, Split] | None = None,
    ) -> None:
        """`splits`: whether prompts may be computed apart from their answers, by model; auto where it is not named."""
        self.index = index if index is not None else PrefixIndex()
        self._strategy = strategy or RoutingSettings().build(self.index)
        self._by_model = by_model or {}
        self._filters = tuple(filters)
        self._splits = splits or {}

    @classmethod
    def from_settings(
        cls,
        routing: RoutingSettings,
        by_model: Mapping[str, RoutingSettings],
        splits: Mapping[str, Split] | None = None,
    ) -> Router:
        index = PrefixIndex()
        strategies = {name: own.build(index) for name, own in by_model.items()}
        return cls(routing.build(index), strategies, index=index, splits=splits)

    def configure(
        self,
        routing: RoutingSettings,
        by_model: Mapping[str, RoutingSettings],
        splits: Mapping[str, Split] | None = None,
    ) -> None:
        """Takes other strategies; what is known of caches stays."""
        strategies = {name: own.build(self.index) for name, own in by_model.items()}
        self._strategy, self._by_model, self._splits = routing.build(self.index), strategies, splits or {}

    def goes_by_prefixes(self, model: str) -> bool:
        """Whether it is of use to know the names of a prompt's blocks."""
        return self._by_model.get(model, self._strategy).index is not None

    def usable(
        self, request: EdgeRequest, replicas: Sequence[ReplicaSnapshot], now: float
    ) -> tuple[Sequence[ReplicaSnapshot], dict[str, str]]:
        """Those that pass every filter, and for each other one the reason."""
        dropped: dict[str, str] = {}
        for reason, keep in self._filters:
            kept = keep(request, replicas, now)
            if kept is not replicas:
                ids = {replica.id for replica in kept}
                dropped.update((replica.id, reason) for replica in replicas if replica.id not in ids)
                replicas = kept
        return replicas, dropped

    def pick(self, request: EdgeRequest, replicas: Sequence[ReplicaSnapshot], now: float) -> Choice:
        usable, dropped = self.usable(request, replicas, now)
        return self.pick_among(request, usable, now, dropped)

    def saved_tokens(self, request: EdgeRequest, replicas: Sequence[ReplicaSnapshot], now: float) -> Mapping[str, int]:
        """The tokens of its prompt that each replica need not compute, where the model's strategy goes by that; less
        those that it could compute in the time that it takes to fetch them."""
        index = self._by_model.get(request.model, self._strategy).index if request.hashes else None
        if index is None:
            return _NOBODY
        index.expire(now)
        held = index.held(request.hashes, replicas)
        if not held:
            return held
        on_host = index.on_host(request.hashes, held)
        return {
            replica.id: saved_tokens(request, replica, held[replica.id], on_host.get(replica.id, 0))
            for replica in replicas
            if replica.id in held
        }

    def narrowed(
        self, request: EdgeRequest, usable: Sequence[ReplicaSnapshot], now: float
    ) -> Sequence[ReplicaSnapshot]:
        """Those that a pick would be made among, where there are too many to look at all of them."""
        index = self._by_model.get(request.model, self._strategy).index if request.hashes else None
        if index is None or len(usable) <= _MANY:
            return usable
        index.expire(now)
        return narrowed(request, usable, index)

    def pick_among(
        self, request: EdgeRequest, usable: Sequence[ReplicaSnapshot], now: float, dropped: dict[str, str]
    ) -> Choice:
        """Score and pick, for who has already filtered."""
        strategy = self._by_model.get(request.model, self._strategy)
        if not usable:
            return Choice(None, dropped=dropped, strategy=strategy.name)
        index = strategy.index if request.hashes else None
        if index is not None:
            index.expire(now)
        if len(usable) > _MANY:
            usable = self.narrowed(request, usable, now)
        usable = prefer_warm(prefer_ready(usable, now), request.random01)
        scores: dict[str, list[float]] = {}
        totals: list[float] = []
        for name, weight, scorer in strategy.scorers:
            values = scorer(request, usable)
            if values is None:
                continue
            scores[name] = values
            if totals:
                totals = [total + weight * value for total, value in zip(totals, values, strict=True)]
            else:
                totals = [weight * value for value in values]
        if not totals:
            totals = [0.0] * len(usable)
        at = strategy.picker(totals, request.random01)
        if strategy.spreads_equals and totals.count(totals[at]) > 1:
            at = least_worked(usable, totals, at)
        picked = usable[at]
        choice = Choice(picked, usable, scores, totals, dropped, strategy.name)
        if index is not None and (matched := index.held(request.hashes, usable)):
            choice.matched, choice.on_host = matched, index.on_host(request.hashes, matched)
            blocks, on_host = matched.get(picked.id, 0), choice.on_host.get(picked.id, 0)
            choice.matched_tokens = request.tokens_of(blocks)
            choice.host_tokens = min(choice.matched_tokens, on_host * request.block_tokens)
            choice.saved_tokens = saved_tokens(request, picked, blocks, on_host)
            choice.is_approximate = not index.is_exact(picked.id)
        return choice

    def add_source(
        self, request: EdgeRequest, choice: Choice, replicas: Sequence[ReplicaSnapshot], now: float, slo: Slo
    ) -> None:
        """Completes a choice with its second leg, if one pays by the model's objectives. `replicas`: all of the model,
        those that were dropped and those that have no room among them."""
        picked = choice.replica
        if picked is None or not picked.kv_address or not (request.can_pull and request.holds_cache):
            return
        strategy, split = self._by_model.get(request.model, self._strategy), self._splits.get(request.model, "auto")
        peers = [replica for replica in replicas if can_pull(picked, replica)]
        index = strategy.index if request.hashes else None
        if len(peers) > _MANY:
            holders = set(index.holders(request.hashes, _HOLDERS)) if index is not None else set()
            idlest = nsmallest(_IDLEST, (one for one in peers if one.role != "decode"), key=lambda one: one.queue_s)
            peers = [one for one in peers if one.id in holders] + [one for one in idlest if one.id not in holders]
        held = self._held(request, [picked, *peers], index)
        load = strategy.load.by_objectives(slo)
        found = choose_source(request, picked, peers, held, load, now, split)
        choice.source, choice.alone = (found, None) if isinstance(found, Source) else (None, found)

    def add_origin(self, request: EdgeRequest, choice: Choice, origin: ReplicaSnapshot, known_tokens: int) -> None:
        """Completes the choice for a stream of so many tokens that a replica which drains has given back."""
        picked = choice.replica
        if picked is None or self._splits.get(request.model, "auto") == "never" or not request.can_pull:
            return
        strategy = self._by_model.get(request.model, self._strategy)
        own = self._held(request, [picked], strategy.index if request.hashes else None).get(picked.id, Held())
        if (found := moved_source(picked, origin, known_tokens, own, strategy.load)) is not None:
            choice.source, choice.alone = found, None

    def _held(
        self, request: EdgeRequest, replicas: Sequence[ReplicaSnapshot], index: PrefixIndex | None
    ) -> Mapping[str, Held]:
        if index is None:
            return {}
        blocks = index.held(request.hashes, replicas)
        on_host, block_tokens = index.on_host(request.hashes, blocks), request.block_tokens
        return {
            name: Held(tokens := request.tokens_of(count), min(tokens, on_host.get(name, 0) * block_tokens))
            for name, count in blocks.items()
        }

    def routed(self, request: EdgeRequest, choice: Choice, now: float) -> None:
        """The request goes where the choice says: to be called for every one that is sent, before the next pick."""
        routed = self._by_model.get(request.model, self._strategy).routed
        if routed is not None and choice.replica is not None:
            routed(request, choice.replica, now)
            if choice.source is not None and choice.source.prefills:
                routed(request, choice.source.replica, now)
