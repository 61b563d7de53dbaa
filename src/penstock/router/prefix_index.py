"""The prefix index: which replica holds the beginning of which prompt, by the hashes of routing blocks.

A replica that publishes what it stores and removes is followed exactly. The index knows of one that says nothing what
was sent there, as much as its KV cache holds, the longest unused forgotten first; so is one that lost events
approximate until its next snapshot. A prompt that was just routed counts as held for a few seconds, so that a burst of
siblings lands together before the first of them has been computed. Some blocks are known to be in a replica's host
memory only: they are held, and what that is worth is for others to say.

It deals in integers. It does not know what a hash is made of, nor how events arrive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from math import inf

from penstock.core.replica import ReplicaSnapshot
from penstock.router.bit_counts import BitCounts

MAX_BLOCKS = 16_384  # of one replica: four million tokens, about 4 MB here
UNKNOWN_CAPACITY_BLOCKS = 4096  # of a replica that does not say how large its KV cache is
PREDICTED_S = 5.0

_NOTHING: dict[str, int] = {}


class _Replica:
    __slots__ = ("bit", "blocks", "has_all", "publishes")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.blocks: dict[int, float] = {}  # hash to when it counts no longer; in the order of their use
        self.publishes = False
        self.has_all = False  # nothing it holds is missing here


class PrefixIndex:
    """A set of replicas is an integer, a bit for each: to walk a prompt's chain is an AND per block.

    Memory is bounded by `max_blocks` for each replica. Of one that publishes more, the newest are not taken in, since
    without a chain's beginning its end is of no use; it counts as approximate from then on. What is on a device only
    takes nothing for being known to be there.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS, predicted_s: float = PREDICTED_S) -> None:
        self._max_blocks = max_blocks
        self._predicted_s = predicted_s
        self._holders: dict[int, int] = {}  # hash to the set of those that hold it
        self._on_host: dict[int, int] = {}  # to that of those who have it in host memory only, if there are any
        self._replicas: dict[str, _Replica] = {}
        self._names: list[str] = []  # by bit; empty: the bit is free
        self._predictions: deque[tuple[float, str, Sequence[int]]] = deque()  # the oldest first
        # A request asks more than once: these are the last answers, for as long as they hold.
        self._walked: tuple[Sequence[int], Sequence[tuple[int, int]]] | None = None
        self._on_host_along = BitCounts()  # with it: who has how many of them on the host
        self._answered: tuple[Sequence[ReplicaSnapshot], dict[str, int]] | None = None
        self._answered_host: tuple[Mapping[str, int], Mapping[str, int]] | None = None

    # -- what replicas say

    def stored(self, replica_id: str, hashes: Collection[int]) -> None:
        """Notes that a replica holds these blocks on its device, wherever they were."""
        replica = self._publisher(replica_id)
        blocks = replica.blocks
        news = [block for block in hashes if blocks.get(block) != inf]
        if len(blocks) + len(news) > self._max_blocks:
            unknown = [block for block in news if block not in blocks]
            room = self._max_blocks - len(blocks)
            replica.has_all &= len(unknown) <= room
            news = [block for block in news if block in blocks] + unknown[:room]
        self._hold(replica, news, inf)
        self._leave_host(replica, hashes)

    def stored_on_host(self, replica_id: str, hashes: Collection[int]) -> None:
        """Notes that a replica holds these blocks in its host memory only, wherever they were."""
        self.stored(replica_id, hashes)
        replica = self._replica(replica_id)
        _join(self._on_host, [block for block in hashes if block in replica.blocks], replica.bit)

    def removed(self, replica_id: str, hashes: Iterable[int]) -> None:
        replica = self._publisher(replica_id)
        self._release(replica, [block for block in hashes if replica.blocks.pop(block, None) is not None])

    def reset(self, replica_id: str, hashes: Collection[int]) -> None:
        """All that it holds, on its device unless it is said anew that it is not: exact from here on. What was just
        routed there is on its way, and stays predicted."""
        replica = self._replica(replica_id)
        told = dict.fromkeys(hashes, inf)
        wrong = [block for block, until in replica.blocks.items() if until == inf and block not in told]
        for block in wrong:
            del replica.blocks[block]
        self._release(replica, wrong)
        replica.publishes = replica.has_all = True
        self.stored(replica_id, told)

    def lost_track(self, replica_id: str) -> None:
        """Events are missing: what is known may be wrong until `reset`."""
        self._replica(replica_id).has_all = False

    def forget(self, replica_id: str) -> None:
        """It is gone, or another process has its name."""
        replica = self._replicas.pop(replica_id, None)
        if replica is not None:
            self._clear(replica)
            self._names[replica.bit.bit_length() - 1] = ""

    # -- what is routed

    def predicted(
        self, replica_id: str, hashes: Sequence[int], now: float, capacity_blocks: int = UNKNOWN_CAPACITY_BLOCKS
    ) -> None:
        """A prompt was sent there. `capacity_blocks`: how much a replica that says nothing can remember of such."""
        replica = self._replicas.get(replica_id) or self._replica(replica_id)
        if replica.publishes:
            until, blocks = now + self._predicted_s, replica.blocks
            hashes = [block for block in hashes if blocks.get(block, 0.0) < until]
            if hashes and len(blocks) + len(hashes) <= self._max_blocks:
                self._hold(replica, hashes, until)
                self._predictions.append((until, replica_id, hashes))
            return
        # A chain's end is older than its beginning, and so forgotten first.
        for block in hashes:
            replica.blocks.pop(block, None)
        self._hold(replica, hashes[::-1], inf)
        if len(replica.blocks) > (most := min(capacity_blocks, self._max_blocks)):
            self._shrink(replica, most)

    def expire(self, now: float) -> None:
        """Ends predictions that no event has confirmed. To be called before a pick; nearly always nothing is due."""
        while self._predictions and self._predictions[0][0] <= now:
            _, replica_id, hashes = self._predictions.popleft()
            replica = self._replicas.get(replica_id)
            if replica is None:
                continue
            over = [block for block in hashes if replica.blocks.get(block, inf) <= now]
            for block in over:
                del replica.blocks[block]
            self._release(replica, over)

    # -- what is asked

    def held(self, hashes: Sequence[int], replicas: Sequence[ReplicaSnapshot]) -> dict[str, int]:
        """Returns how many first blocks of a prompt each of these has; those without are left out. Do not change it."""
        walked = self._walked
        walk = walked[1] if walked is not None and walked[0] is hashes else self._walk(hashes)
        if not walk:
            return _NOTHING
        if self._answered is not None and self._answered[0] is replicas:
            return self._answered[1]
        found, known = {}, self._replicas
        for replica in replicas:
            one = known.get(replica.id)
            if one is not None:
                for depth, holders in walk:
                    if holders & one.bit:
                        found[replica.id] = depth
                        break
        self._answered = (replicas, found)
        return found

    def on_host(self, hashes: Sequence[int], held: Mapping[str, int]) -> Mapping[str, int]:
        """Returns how many of the blocks that these have, as `held` says, are in their host memory only; one that has
        none is not in it."""
        if not self._on_host:
            return _NOTHING
        self._walk(hashes)
        if not self._on_host_along:
            return _NOTHING
        if self._answered_host is None or self._answered_host[0] is not held:
            known, count = self._replicas, self._on_host_along.of
            self._answered_host = (held, {name: n for name in held if (n := count(known[name].bit))})
        return self._answered_host[1]

    def holders(self, hashes: Sequence[int], most: int) -> list[str]:
        """Those who have some of a prompt's beginning, who has most of it first."""
        found: list[str] = []
        seen = 0
        for _, holders in self._walk(hashes):
            rest = holders & ~seen
            seen = holders
            while rest and len(found) < most:
                lowest = rest & -rest
                found.append(self._names[lowest.bit_length() - 1])
                rest ^= lowest
        return found

    def is_exact(self, replica_id: str) -> bool:
        replica = self._replicas.get(replica_id)
        return replica is not None and replica.has_all

    def num_blocks(self, replica_id: str) -> int:
        replica = self._replicas.get(replica_id)
        return len(replica.blocks) if replica is not None else 0

    @property
    def num_hashes(self) -> int:
        return len(self._holders)

    # -- inside

    def _replica(self, replica_id: str) -> _Replica:
        replica = self._replicas.get(replica_id)
        if replica is None:
            slot = self._names.index("") if "" in self._names else len(self._names)
            self._names[slot : slot + 1] = [replica_id]
            replica = self._replicas[replica_id] = _Replica(1 << slot)
        return replica

    def _publisher(self, replica_id: str) -> _Replica:
        """Returns a replica that publishes. From its first event on it is believed, and guesses about it are not."""
        replica = self._replica(replica_id)
        if not replica.publishes:
            self._clear(replica)
            replica.publishes = True
        return replica

    def _walk(self, hashes: Sequence[int]) -> Sequence[tuple[int, int]]:
        """Returns depths into the chain, each with the holders up to there as bits; the deepest first."""
        if self._walked is not None and self._walked[0] is hashes:
            return self._walked[1]
        steps: list[tuple[int, int]] = []
        get, depth = self._holders.get, 0
        alive = get(hashes[0], 0) if hashes else 0
        for block in hashes if alive else ():
            still = alive & get(block, 0)
            if still != alive:
                steps.append((depth, alive))
                alive = still
                if not alive:
                    break
            depth += 1
        if alive:
            steps.append((depth, alive))
        self._on_host_along = self._count_host(hashes, steps) if self._on_host else BitCounts()
        steps.reverse()
        self._walked, self._answered, self._answered_host = (hashes, steps), None, None
        return steps

    def _count_host(self, hashes: Sequence[int], steps: Sequence[tuple[int, int]]) -> BitCounts:
        """`steps`: the least deep first."""
        counts, get, begin = BitCounts(), self._on_host.get, 0
        for depth, alive in steps:
            for block in hashes[begin:depth]:
                if those := get(block, 0) & alive:
                    counts.add(those)
            begin = depth
        return counts

    def _hold(self, replica: _Replica, hashes: Sequence[int], until: float) -> None:
        self._walked = None
        replica.blocks.update(dict.fromkeys(hashes, until))
        _join(self._holders, hashes, replica.bit)

    def _release(self, replica: _Replica, hashes: Collection[int]) -> None:
        """Takes the replica out of the holders of blocks that were taken out of its own."""
        holders, others = self._holders, ~replica.bit
        self._walked = None
        for block in hashes:
            rest = holders[block] & others
            if rest:
                holders[block] = rest
            else:
                del holders[block]
        self._leave_host(replica, hashes)

    def _leave_host(self, replica: _Replica, hashes: Collection[int]) -> None:
        on_host, bit = self._on_host, replica.bit
        if not on_host:
            return
        self._walked = None
        for block in hashes:
            there = on_host.get(block, 0)
            if there == bit:
                del on_host[block]
            elif there & bit:
                on_host[block] = there ^ bit

    def _clear(self, replica: _Replica) -> None:
        blocks, replica.blocks = replica.blocks, {}
        self._release(replica, blocks)

    def _shrink(self, replica: _Replica, most: int) -> None:
        oldest = list(islice(replica.blocks, len(replica.blocks) - most))
        for block in oldest:
            del replica.blocks[block]
        self._release(replica, oldest)


def _join(sets: dict[int, int], hashes: Iterable[int], bit: int) -> None:
    get = sets.get
    for block in hashes:
        there = get(block)
        sets[block] = bit if there is None else there | bit  # one number for all blocks that a replica has alone
