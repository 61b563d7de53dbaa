"""A sequence's view of the cache: find a prefix, own a table of blocks, grow it, publish it, give it back.

A `BlockTable` is ownership: it is released on every path, and nothing else holds references to blocks.
"No room" is None or False; who must make room is the scheduler's decision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from penstock.core.hashing import BlockHash, block_hash, chain_routing, root_hash, routing_root
from penstock.core.request import AdapterRef
from penstock.kv.host import HostBlocks
from penstock.kv.pool import BlockPool
from penstock.kv.routing import RoutingBlocks


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
        """Of the routing block that ends at `(index + 1) * size` of these tokens."""
        known = self._routing
        if index >= len(known):
            parent = known[-1] if known else routing_root(self._namespace, adapter=self._adapter)
            known += chain_routing(parent, token_ids[len(known) * size :], size)
        return known[index]


@dataclass(frozen=True)
class PrefixMatch:
    """What the cache already holds of a token list."""

    block_ids: tuple[int, ...] = ()  # full blocks, shared as they are
    num_tokens: int = 0  # the partial block's included
    partial_block: int | None = None  # shares its first tokens only: to be copied, then written (copy-on-write)
    on_host: tuple[BlockHash, ...] = ()  # full blocks after those, to be copied from host memory
    is_pending: bool = False  # the next block is being computed by a running sequence right now


class BlockTable:
    """The blocks one sequence owns, in order."""

    def __init__(
        self, cache: KVCache, block_ids: list[int], num_published: int, awaited: Sequence[BlockHash], num_shared: int
    ) -> None:
        self.block_ids = block_ids
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
        for announced in self._announced:
            self._cache.retract(announced)
        self._announced = []


class KVCache:
    """With `routing_tokens` it knows which routing blocks it holds; whoever asks for that must go on asking.

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
    ) -> None:
        """`host_blocks`: more of them, in host memory; `copy_s`: what it takes to copy one there and back."""
        self.pool = BlockPool(num_blocks, block_size)
        if host_blocks and share_prefixes:
            self.pool.host = HostBlocks(host_blocks, num_blocks, block_size=block_size, copy_s=copy_s)
        self.shares_prefixes = share_prefixes
        can_route = share_prefixes and routing_tokens >= block_size and routing_tokens % block_size == 0
        self.routing = RoutingBlocks(self.pool, routing_tokens) if can_route else None
        self._pending: Counter[BlockHash] = Counter()  # prompt blocks that running sequences are about to compute

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    @property
    def capacity_tokens(self) -> int:
        return self.pool.num_blocks * self.pool.block_size

    @property
    def held_tokens(self) -> int:
        """That the blocks which sequences hold have room for: one that several share counts once, one that is merely
        cached is free."""
        return (self.pool.num_blocks - self.pool.num_free) * self.pool.block_size

    def num_known(self, hashes: Sequence[BlockHash]) -> int:
        """How many of a chain's first blocks are there, or are being computed right now."""
        find, pending = self.pool.find, self._pending
        return next((i for i, own in enumerate(hashes) if find(own) is None and own not in pending), len(hashes))

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
        on_host = self._on_host(hashes.hashes[len(found) : limit // size])
        index = len(found) + len(on_host)
        start = index * size
        if index < len(hashes.hashes) and hashes.hashes[index] in self._pending:
            return PrefixMatch(tuple(found), start, is_pending=True, on_host=on_host)
        partial = pool.find_partial(hashes.parent(index), token_ids[start : min(start + size, limit)])
        if partial is None:
            return PrefixMatch(tuple(found), start, on_host=on_host)
        return PrefixMatch(tuple(found), start + partial[1], partial_block=partial[0], on_host=on_host)

    def _on_host(self, hashes: Sequence[BlockHash]) -> tuple[BlockHash, ...]:
        """How the chain goes on in host memory, unless computing it is faster, or somebody is."""
        host, pending = self.pool.host, self._pending
        if host is None or not host.pays:
            return ()
        return tuple(takewhile(lambda own: own in host and own not in pending, hashes))

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

        What is on the host, and a partial block, is copied into the first of the fresh ones. `token_ids`: those that
        were matched; they are needed if some are on the host.
        """
        pool = self.pool
        shared = len(match.block_ids)
        fresh = self.blocks_for(num_tokens) - shared
        revived = sum(pool.is_free(block_id) for block_id in match.block_ids)
        if fresh + revived + reserve > pool.num_free:
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
        awaited = hashes.hashes[known : self.blocks_for(num_tokens)] if self.shares_prefixes else []
        self._pending.update(awaited)
        table = BlockTable(self, [*match.block_ids, *taken], shared, awaited, shared - revived)
        if match.on_host:
            table.publish(hashes, token_ids, known * pool.block_size)
        return table

    def observe(
        self, prefill_tokens: int, step_s: float, num_decodes: int = 0, moves: Sequence[tuple[int, int]] = ()
    ) -> None:
        """A step that began with these moves computed so many tokens of prompts: it decides what is worth copying."""
        host = self.pool.host
        if host is not None:
            host.observe(prefill_tokens, step_s, num_decodes, sum(host.is_here(source) for source, _ in moves))

    @property
    def loaded_tokens(self) -> int:
        """That came back from host memory, since the start."""
        return self.pool.host.num_loaded * self.pool.block_size if self.pool.host is not None else 0

    def undo(self, moves: Sequence[tuple[int, int]]) -> None:
        """These blocks may not have been copied: nobody is to find them."""
        host = self.pool.host
        for _, destination in moves:
            if host is not None and host.is_here(destination):
                host.lose(destination)
            else:
                self.pool.spoil(destination)

    def clear(self) -> None:
        """Forget all blocks on the device, of which nobody holds one: their memory goes. What is on the host stays."""
        assert self.pool.num_free == self.pool.num_blocks, "a sequence holds blocks"
        self.undo(self.pool.take_moves())  # that no step has made
        self.pool.clear()

    def retract(self, announced: BlockHash) -> None:
        """Nobody need wait for this block any longer: it is published, or it will not come."""
        self._pending[announced] -= 1
        if self._pending[announced] <= 0:
            del self._pending[announced]
