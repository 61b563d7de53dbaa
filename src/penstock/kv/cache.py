"""A sequence's view of the cache: find a prefix, own a table of blocks, grow it, publish it, give it back.

A `BlockTable` is ownership: it is released on every path, and nothing else holds references to blocks.
"No room" is None or False; who must make room is the scheduler's decision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, takewhile

from penstock.core.hashing import BlockHash, block_hash, chain_routing, root_hash, routing_root
from penstock.core.request import AdapterRef
from penstock.kv.disk import BlockFiles, DiskBlocks
from penstock.kv.host import HostBlocks
from penstock.kv.pool import BlockPool
from penstock.kv.routing import RoutingBlocks
from penstock.kv.states import StateSlots


class TokenHashes:
    """The hash chain of a growing token list, one hash per full block."""

    def __init__(self, namespace: str, block_size: int, adapter: AdapterRef | None = None) -> None:
        self._root = root_hash(namespace, adapter.digest if adapter else "")
        self._namespace = namespace
        self._adapter = adapter.name if adapter else ""
        self._block_size = block_size
        self._routing: list[int] = []  # once somebody asked
        self.hashes: list[BlockHash] = []

    def extend(self, token_ids: Sequence[int]) -> None:
        """Bring the chain up to date with `token_ids`, which only ever grows at its end."""
        size = self._block_size
        while (len(self.hashes) + 1) * size <= len(token_ids):
            index = len(self.hashes)
            self.hashes.append(block_hash(self.parent(index), token_ids[index * size : (index + 1) * size]))

    def parent(self, index: int) -> BlockHash:
        return self.hashes[index - 1] if index else self._root

    def routing_hash(self, index: int, token_ids: Sequence[int], size: int) -> int:
        """Hash of the routing block that ends at `(index + 1) * size` of these tokens."""
        known = self._routing
        if index >= len(known):
            parent = known[-1] if known else routing_root(self._namespace, adapter=self._adapter)
            known += chain_routing(parent, token_ids[len(known) * size :], size)
        return known[index]


@dataclass(frozen=True)
class PrefixMatch:
    """Part of a token list that the cache already holds."""

    block_ids: tuple[int, ...] = ()  # full blocks, shared as they are
    num_tokens: int = 0  # the partial block's included
    partial_block: int | None = None  # shares its first tokens only: to be copied, then written (copy-on-write)
    on_host: tuple[BlockHash, ...] = ()  # full blocks after those, to be copied from host memory
    num_beyond: int = 0  # full blocks after those, on disk or on the host: to be fetched first
    is_pending: bool = False  # the next block is being computed by a running sequence, or read from disk, right now
    # End of the known blocks, with recurrent states, if it is beyond the last snapshot. A sequence that comes by there
    # should leave one: it is where prompts part.
    parting: int = 0


class BlockTable:
    """The blocks one sequence owns, in order."""

    def __init__(
        self, cache: KVCache, block_ids: list[int], num_published: int, awaited: Sequence[BlockHash], num_shared: int
    ) -> None:
        self.block_ids = block_ids
        self.state_slot: int | None = None  # of its recurrent state, if the model has one
        self._snapshots_at: list[int] = []  # tokens at which a snapshot of it is worth taking, in ascending order
        self.num_shared = num_shared  # of its blocks, held by others when it took them
        self._cache = cache
        self._num_published = num_published
        self._announced = list(awaited)

    def grow(self, num_tokens: int) -> bool:
        """Own enough blocks for `num_tokens` in all, or change nothing and say False."""
        missing = self._cache.blocks_for(num_tokens) - len(self.block_ids)
        if missing <= 0:
            return True
        fresh = self._cache.pool.allocate(missing)
        if fresh is None:
            return False
        self.block_ids.extend(fresh)
        return True

    def reach(self, start: int, count: int) -> int:
        """Number of tokens from `start` that a slice may have: none goes past a place where a snapshot is taken."""
        ends = [place - start for place in self._snapshots_at if place > start]
        return min(count, *ends) if ends else count

    def keep_state(self, num_computed: int, hashes: TokenHashes) -> None:
        """A slice is planned that begins here: what the state is before it may be worth keeping."""
        while self._snapshots_at and self._snapshots_at[0] <= num_computed:
            if self._snapshots_at.pop(0) == num_computed:
                assert self._cache.states is not None
                assert self.state_slot is not None
                self._cache.states.keep(self.state_slot, hashes.parent(num_computed // self._cache.pool.block_size))

    def publish(self, hashes: TokenHashes, token_ids: Sequence[int], num_computed: int) -> None:
        """Make every block found whose content is complete now that `num_computed` tokens are in the cache."""
        if not self._cache.shares_prefixes:
            return
        size, routing = self._cache.pool.block_size, self._cache.routing
        for index in range(self._num_published, min(num_computed // size, len(hashes.hashes))):
            tokens = token_ids[index * size : (index + 1) * size]
            own = hashes.hashes[index]
            is_new = self._cache.pool.publish(self.block_ids[index], own, hashes.parent(index), tokens)
            if routing is not None and is_new and (index + 1) % routing.parts == 0:
                routing.name(own, hashes.routing_hash(index // routing.parts, token_ids, routing.size))
            self._num_published = index + 1
        while self._announced and self._cache.pool.find(self._announced[0]) is not None:
            self._cache.retract(self._announced.pop(0))

    def release(self) -> None:
        self._cache.pool.release(self.block_ids)
        self.block_ids = []
        if self.state_slot is not None and self._cache.states is not None:
            self._cache.states.release(self.state_slot)
            self.state_slot = None
        for announced in self._announced:
            self._cache.retract(announced)
        self._announced = []


class KVCache:
    """Knows with `routing_tokens` which routing blocks it holds; a caller that asks for them must go on asking.

    It does not if blocks cannot be shared, or if routing blocks are not made of whole blocks.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        share_prefixes: bool = True,
        routing_tokens: int = 0,
        host_blocks: int = 0,
        copy_s: float = 0.0,
        states: StateSlots | None = None,
    ) -> None:
        """`host_blocks`: more of them, in host memory; `copy_s`: what it takes to copy one there and back.
        `states`: of a model whose sequences have recurrent ones, as many as may run."""
        self.states = states
        self.pool = BlockPool(num_blocks, block_size)
        if host_blocks and share_prefixes:
            self.pool.host = HostBlocks(host_blocks, num_blocks, block_size=block_size, copy_s=copy_s)
        self.shares_prefixes = share_prefixes
        can_route = share_prefixes and routing_tokens >= block_size and routing_tokens % block_size == 0
        self.routing = RoutingBlocks(self.pool, routing_tokens) if can_route else None
        self._pending: Counter[BlockHash] = Counter()  # blocks that are about to be computed, or read from disk
        self._arriving: Counter[int] = Counter()  # blocks that can be found before the step that copies them has ended

    def keep_on_disk(self, files: BlockFiles) -> None:
        """Blocks in host memory are written into these files, and come back from there."""
        host, routing = self.pool.host, self.routing
        assert host is not None, "blocks come to the disk and back through host memory"
        host.disk = DiskBlocks(files, host, routing_hash=routing.name_of) if routing else DiskBlocks(files, host)
        if routing is not None:
            host.disk.chains.note_changes(routing.noted)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    @property
    def capacity_tokens(self) -> int:
        return self.pool.num_blocks * self.pool.block_size

    @property
    def held_tokens(self) -> int:
        """Tokens that the blocks which sequences hold have room for: one that several share counts once, one that is
        merely cached is free."""
        return (self.pool.num_blocks - self.pool.num_free) * self.pool.block_size

    def num_known(self, hashes: Sequence[BlockHash]) -> int:
        """Number of a chain's first blocks that are there, or are being computed right now."""
        find, pending = self.pool.find, self._pending
        return next((i for i, own in enumerate(hashes) if find(own) is None and own not in pending), len(hashes))

    def find_settled(self, own: BlockHash) -> int | None:
        """A block whose bytes are in the device's memory now, and not only once a step has ended."""
        block_id = self.pool.find(own)
        return None if block_id is None or block_id in self._arriving else block_id

    def match_settled(self, hashes: Sequence[BlockHash]) -> PrefixMatch:
        """The same of a chain's first blocks, as a match that holds nothing else."""
        found = takewhile(lambda block_id: block_id is not None, map(self.find_settled, hashes))
        block_ids = tuple(block_id for block_id in found if block_id is not None)
        return PrefixMatch(block_ids, len(block_ids) * self.pool.block_size)

    def is_pending(self, own: BlockHash) -> bool:
        """A sequence that holds blocks is about to publish it."""
        return own in self._pending

    def match(self, hashes: TokenHashes, token_ids: Sequence[int], limit: int) -> PrefixMatch:
        """The longest cached prefix of `token_ids` of at most `limit` tokens. Takes nothing."""
        if not self.shares_prefixes:
            return PrefixMatch()
        pool, size = self.pool, self.pool.block_size
        found: list[int] = []
        for known in hashes.hashes[: limit // size]:
            block_id = pool.find(known)
            if block_id is None:
                break
            found.append(block_id)
        if self.states is not None:
            return self._match_with_state(self.states, hashes, found)
        on_host = self._on_host(hashes.hashes[len(found) : limit // size])
        index = len(found) + len(on_host)
        start = index * size
        if index < len(hashes.hashes) and hashes.hashes[index] in self._pending:
            return PrefixMatch(tuple(found), start, is_pending=True, on_host=on_host)
        beyond = self._num_beyond(hashes.hashes[index : limit // size])
        partial = pool.find_partial(hashes.parent(index), token_ids[start : min(start + size, limit)])
        block, common = partial or (None, 0)
        return PrefixMatch(tuple(found), start + common, partial_block=block, on_host=on_host, num_beyond=beyond)

    def _match_with_state(self, states: StateSlots, hashes: TokenHashes, found: list[int]) -> PrefixMatch:
        """Match of the chain's blocks that are here, up to the last one with a snapshot. Blocks that another sequence
        is computing are not waited for: they may bring no snapshot."""
        size = self.pool.block_size
        count = next((n for n in range(len(found), 0, -1) if hashes.hashes[n - 1] in states), 0)
        return PrefixMatch(tuple(found[:count]), count * size, parting=len(found) * size)

    def _on_host(self, hashes: Sequence[BlockHash]) -> tuple[BlockHash, ...]:
        """Hashes by which the chain goes on in host memory, unless computing is faster, or somebody computes them."""
        host, pending = self.pool.host, self._pending
        if host is None or not host.pays:
            return ()
        return tuple(takewhile(lambda own: own in host and own not in pending, hashes))

    def _num_beyond(self, hashes: Sequence[BlockHash]) -> int:
        """Number of blocks by which the chain goes on, on disk or on the host."""
        host, disk, pending = self.pool.host, self.disk, self._pending
        if host is None or disk is None or not host.pays:
            return 0
        return sum(1 for _ in takewhile(lambda own: (own in disk or own in host) and own not in pending, hashes))

    # -- the disk

    @property
    def disk(self) -> DiskBlocks | None:
        return self.pool.host.disk if self.pool.host is not None else None

    def fetch(self, match: PrefixMatch, hashes: TokenHashes, now: float) -> bool:
        """Begin to read the blocks that go on after a match from disk. False: there is nothing to wait for."""
        disk, first = self.disk, len(match.block_ids)
        if disk is None:
            return False
        last = first + len(match.on_host) + match.num_beyond
        started = disk.fetch([(hashes.hashes[i], hashes.parent(i)) for i in range(first, last)], now)
        self._pending.update(started)
        return bool(started)

    def poll(self, now: float) -> None:
        """Take in what the disk has done meanwhile."""
        if self.disk is None:
            return
        ended, found = self.disk.poll(now)
        for own in ended:
            self.retract(own)
        for block in found:
            if self.routing is not None and block.routing_hash is not None:
                self.routing.name(block.own, block.routing_hash)

    def settle(self, moves: Sequence[tuple[int, int]]) -> None:
        """The step that began with these moves has ended."""
        host, arriving = self.pool.host, self._arriving
        if host is not None:
            for block_id in chain.from_iterable(moves):
                if host.is_here(block_id):
                    host.end_move(block_id)
        for _, destination in moves if arriving else ():
            if destination in arriving:
                arriving[destination] -= 1
                if arriving[destination] <= 0:
                    del arriving[destination]

    def acquire(
        self,
        match: PrefixMatch,
        num_tokens: int,
        hashes: TokenHashes,
        token_ids: Sequence[int] = (),
        *,
        reserve: int = 0,
    ) -> BlockTable | None:
        """Own the matched blocks and fresh ones for `num_tokens` in all, leaving `reserve` blocks free; or None.

        Blocks on the host, and a partial one, are copied into the first of the fresh ones. `token_ids`: those that were
        matched; they are needed if some are on the host.
        """
        pool = self.pool
        shared = len(match.block_ids)
        fresh = self.blocks_for(num_tokens) - shared
        revived = sum(pool.is_free(block_id) for block_id in match.block_ids)
        if fresh + revived + reserve > pool.num_free or (self.states is not None and not self.states.num_free):
            return None
        for block_id in match.block_ids:
            pool.retain(block_id)
        sources = [pool.host.take(own) for own in match.on_host] if pool.host is not None else []
        taken = pool.allocate(fresh)
        assert taken is not None
        if match.partial_block is not None:  # before the others: it may be where one of them goes
            pool.moves.append((match.partial_block, taken[len(sources)]))
        if pool.host is not None:
            for index, (own, source) in enumerate(zip(match.on_host, sources, strict=True), shared):
                pool.host.put_back(own, hashes.parent(index), source)
        pool.moves += zip(sources, taken, strict=False)
        known = shared + len(match.on_host)
        is_awaited = self.shares_prefixes and self.states is None
        awaited = hashes.hashes[known : self.blocks_for(num_tokens)] if is_awaited else []
        self._pending.update(awaited)
        table = BlockTable(self, [*match.block_ids, *taken], shared, awaited, shared - revived)
        if self.states is not None:
            self._give_state(self.states, table, match, num_tokens, hashes)
        if match.on_host:
            table.publish(hashes, token_ids, known * pool.block_size)
            self._arriving.update(table.block_ids[shared:known])
        return table

    def _give_state(
        self, states: StateSlots, table: BlockTable, match: PrefixMatch, num_tokens: int, hashes: TokenHashes
    ) -> None:
        """A slot, with the state at the end of the match, and the places where others may want to go on from: where
        known blocks end, and where this prompt's do."""
        slot, size, known = states.allocate(), self.pool.block_size, match.num_tokens
        assert slot is not None
        table.state_slot = slot
        if known:
            states.resume(hashes.parent(known // size), slot)
        if self.shares_prefixes and states.num_snapshots:
            places = {match.parting, (num_tokens - 1) // size * size}
            table._snapshots_at = sorted(place for place in places if place > known and place >= states.min_tokens)

    def observe(
        self, prefill_tokens: int, step_s: float, num_decodes: int = 0, moves: Sequence[tuple[int, int]] = ()
    ) -> None:
        """A step that began with these moves computed so many tokens of prompts: it decides what is worth copying."""
        host = self.pool.host
        if host is not None:
            host.observe(prefill_tokens, step_s, num_decodes, sum(host.is_here(source) for source, _ in moves))

    @property
    def loaded_tokens(self) -> int:
        """Number of tokens that came back from host memory, since the start."""
        return self.pool.host.num_loaded * self.pool.block_size if self.pool.host is not None else 0

    def undo(self, moves: Sequence[tuple[int, int]]) -> None:
        """These blocks may not have been copied: nobody is to find them."""
        host = self.pool.host
        for _, destination in moves:
            if host is not None and host.is_here(destination):
                host.lose(destination)
            else:
                self.pool.spoil(destination)
        self.settle(moves)

    def forgo_saves(self, block_ids: Sequence[int]) -> None:
        """These blocks will be written before the next step begins: what was to be copied from them is lost."""
        chosen = {*block_ids}
        lost = [move for move in self.pool.moves if move[0] in chosen]
        self.pool.moves = [move for move in self.pool.moves if move[0] not in chosen]
        self.undo(lost)

    def clear(self) -> None:
        """Forget all blocks on the device, of which nobody holds one: their memory goes. Blocks on the host stay."""
        assert self.pool.num_free == self.pool.num_blocks, "a sequence holds blocks"
        self.undo(self.pool.take_moves())  # that no step has made
        if self.states is not None:
            self.states.clear()
        self.pool.clear()

    def retract(self, announced: BlockHash) -> None:
        """Nobody need wait for this block any longer: it is published, or it will not come."""
        self._pending[announced] -= 1
        if self._pending[announced] <= 0:
            del self._pending[announced]
