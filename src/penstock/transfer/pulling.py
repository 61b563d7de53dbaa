"""Prompts whose KV blocks come from another engine: what is asked for, where it lands, and when it is given up.

A pull takes the blocks of its whole prompt before the first one comes, and its sequence enters with them: what came is
not lost to others while it waits for a place. Nothing is found in the cache before it has landed, whole and verified. A
pull that ends before all has landed gives its blocks back; what has landed stays in the cache, and the sequence goes
back to the queue and computes the rest: that costs it time, and never a wrong token. It has never seen a socket or a
clock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from msgspec.structs import replace

from penstock.core.hashing import BlockHash
from penstock.core.request import Cost, KvSource
from penstock.kv.cache import BlockTable, KVCache
from penstock.sched.sequence import Sequence
from penstock.transfer.messages import Ask, Ended
from penstock.transfer.ports import Event, Heard, Landed, Network, Told

MAX_ROOM_S = 10.0  # without blocks to land in; then it waits for them in the queue, as all do
MAX_STALL_S = 120.0  # without a block, however lively the other engine is
_KEEP_S = 1.0  # how often the other side hears that blocks are still wanted
_MAX_SHARE = 0.5  # of all blocks, held for prompts that do not run yet
_RECENT = 0.9  # of what was known of speed, at every pull


@dataclass
class Pull:
    sequence: Sequence
    source: KvSource
    first: int  # blocks of the sequence that were here before
    end: int  # blocks of the sequence that are asked for end here
    began_s: float
    heard_s: float  # from the other engine
    moved_s: float  # when the last block came
    table: BlockTable | None = None  # None: there is no room yet
    num_launched: int = 0  # steps, when it took its table: they may write there until they have ended
    landing_s: float | None = None  # since when blocks may come
    landed: set[int] = field(default_factory=set)  # out of order, beyond `num_landed`
    num_landed: int = 0
    is_dropped: bool = False  # nothing more is wanted: blocks are held until nobody writes there
    is_given_up: bool = False  # its sequence is gone

    @property
    def count(self) -> int:
        return self.end - self.first

    @property
    def num_tokens(self) -> int:
        return (self.first + self.num_landed) * self.sequence.block_size


@dataclass
class PullTotals:
    """Counters since the engine's start."""

    pulled_tokens: int = 0
    pulls: int = 0
    failed: int = 0  # ended before all had landed
    seconds: float = 0.0


class Puller:
    def __init__(
        self,
        cache: KVCache,
        network: Network,
        costs: list[tuple[str, Cost]],
        ended: list[Sequence],
        *,
        timeout_s: float,
    ) -> None:
        """`costs`: takes what was used elsewhere for requests of ours; `ended`: sequences whose pull has ended;
        `timeout_s`: silence of the other engine after which a pull is given up."""
        self.totals = PullTotals()
        self._cache = cache
        self._network = network
        self._costs = costs
        self._ended = ended
        self._timeout_s = timeout_s
        self._pulls: dict[int, Pull] = {}
        self._tickets = 0
        self._kept_s = 0.0
        self._awaited: Counter[BlockHash] = Counter()  # of all pulls
        self._has_room, self._launched, self._done = True, 0, 0  # as `advance` was last told
        self._recent_tokens = self._recent_s = 0.0  # that landed, in pulls that ended, the newest most

    @property
    def has_work(self) -> bool:
        return bool(self._pulls)

    @property
    def tokens_per_s(self) -> float | None:
        """The speed of pulls of blocks that were there; None: nothing was pulled yet."""
        return self._recent_tokens / self._recent_s if self._recent_s > 0 else None

    def is_awaited(self, own: BlockHash) -> bool:
        """A pull waits for this block."""
        return own in self._awaited

    def begin(self, sequence: Sequence, source: KvSource, now: float) -> bool:
        """Ask for what is not here of a sequence that waits. False: it does not wait for anybody."""
        cache, size = self._cache, self._cache.pool.block_size
        if not cache.shares_prefixes:
            return False
        tokens, hashes = sequence.token_ids, sequence.hashes.hashes
        end = (len(tokens) - 1) // size
        match = cache.match(sequence.hashes, tokens, limit=end * size)
        first = len(cache.match_settled(hashes[:end]).block_ids)
        if match.is_pending or first < len(match.block_ids) or len(match.block_ids) + len(match.on_host) >= end:
            return False  # somebody computes, pulls or loads it already, or it is here
        self._tickets += 1
        ticket, pull = self._tickets, Pull(sequence, source, first, end, now, now, now)
        self._pulls[ticket] = pull
        self._awaited.update(hashes[first:end])
        sequence.is_pulled = True
        self.totals.pulls += 1
        prefill = None
        if source.prefills and not sequence.request.images:  # pixels stay here: they may be larger than a message
            prompt = tokens[: end * size]
            prefill = replace(sequence.request, prompt_ids=prompt, output_ids=[], guide=None, is_resumed=False)
        self._network.ask(source.address, Ask(ticket, hashes[first:end], prefill=prefill))
        self._go_on(ticket, pull, now)
        return True

    def _go_on(self, ticket: int, pull: Pull, now: float) -> None:
        """Towards a place to land in."""
        if pull.is_dropped or pull.landing_s is not None:
            return
        if pull.table is None and self._has_room:
            self._find_room(ticket, pull)
        if pull.table is not None and self._done >= pull.num_launched:
            pull.landing_s = now
            self._network.land(ticket, pull.table.block_ids[pull.first : pull.end])
        elif pull.table is None and now - pull.began_s > MAX_ROOM_S:
            self._drop(ticket, pull)

    def _find_room(self, ticket: int, pull: Pull) -> None:
        cache, sequence = self._cache, pull.sequence
        hashes = sequence.hashes.hashes
        num_held = sum(len(one.table.block_ids) for one in self._pulls.values() if one.table is not None)
        if num_held > _MAX_SHARE * cache.pool.num_blocks:
            return
        match = cache.match_settled(hashes[: pull.first])
        if len(match.block_ids) < pull.first or cache.is_pending(hashes[pull.first]):
            self._drop(ticket, pull)  # what was here has gone: the chain would have a gap; or somebody was faster
            return
        reserve = cache.pool.num_blocks // 16
        table = cache.acquire(match, len(sequence.token_ids), sequence.hashes, sequence.token_ids, reserve=reserve)
        if table is None:
            return
        cache.forgo_saves(table.block_ids[pull.first :])
        pull.table, pull.num_launched = table, self._launched

    # -- what comes

    def receive(self, event: Event, now: float) -> None:
        match event:
            case Landed(ticket, first, count):
                if (pull := self._pulls.get(ticket)) is not None and pull.table is not None:
                    self._land(pull, first, count, now)
            case Heard(tickets):
                for ticket in tickets:
                    if (pull := self._pulls.get(ticket)) is not None:
                        pull.heard_s = now
            case Told(ended):
                if (pull := self._pulls.pop(ended.ticket, None)) is not None:
                    self._end(pull, ended, now)

    def _land(self, pull: Pull, first: int, count: int, now: float) -> None:
        """Blocks are published in the order of the chain."""
        assert pull.table is not None
        pull.heard_s = pull.moved_s = now
        pull.landed.update(range(max(first, pull.num_landed), min(first + count, pull.count)))
        before = pull.num_landed
        while pull.num_landed in pull.landed:
            pull.landed.remove(pull.num_landed)
            pull.num_landed += 1
        self.totals.pulled_tokens += (pull.num_landed - before) * self._cache.pool.block_size
        pull.table.publish(pull.sequence.hashes, pull.sequence.token_ids, pull.num_tokens)

    def _end(self, pull: Pull, ended: Ended, now: float) -> None:
        sequence, size = pull.sequence, self._cache.pool.block_size
        self._awaited -= Counter(sequence.hashes.hashes[pull.first : pull.end])
        self.totals.seconds += now - pull.began_s
        is_whole = pull.num_landed == pull.count
        if not is_whole:
            self.totals.failed += 1
        elif ended.computed_tokens == 0 and pull.landing_s is not None:
            self._recent_tokens = _RECENT * self._recent_tokens + pull.num_landed * size
            self._recent_s = _RECENT * self._recent_s + now - pull.landing_s
        if ended.device_s or ended.kv_block_s:
            self._costs.append((sequence.request.id, Cost(ended.device_s, ended.kv_block_s)))
        if pull.table is not None and (pull.is_given_up or not is_whole):
            pull.table.release()
        if pull.is_given_up:
            return
        sequence.is_pulled = False
        sequence.pull_s = now - pull.began_s
        sequence.num_pulled = pull.num_landed * size
        sequence.is_pull_whole = is_whole
        sequence.num_computed_elsewhere = min(ended.computed_tokens, sequence.num_pulled)
        if is_whole and pull.table is not None:
            sequence.pulled = (pull.table, pull.num_tokens)
        self._ended.append(sequence)

    # -- between steps

    def advance(self, now: float, *, has_room: bool, launched: int, done: int) -> None:
        """`has_room`: nobody in the queue waits for blocks; `launched`, `done`: steps since the start."""
        self._has_room, self._launched, self._done = has_room, launched, done
        for ticket, pull in list(self._pulls.items()):
            self._go_on(ticket, pull, now)
            if now - pull.heard_s > self._timeout_s:
                pull.heard_s = now
                self._network.hang_up(ticket)
            elif now - pull.moved_s > MAX_STALL_S:
                self._drop(ticket, pull)
        if self._pulls and now - self._kept_s >= _KEEP_S:
            self._kept_s = now
            self._network.keep([*self._pulls])

    def _drop(self, ticket: int, pull: Pull) -> None:
        if not pull.is_dropped:
            pull.is_dropped = True
            self._network.drop(ticket)

    def abandon(self, request_id: str) -> None:
        """Its sequence has ended."""
        for ticket, pull in self._pulls.items():
            if pull.sequence.request.id == request_id:
                pull.is_given_up = True
                self._drop(ticket, pull)
