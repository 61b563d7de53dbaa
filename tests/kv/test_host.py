"""Blocks that live on in host memory."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from penstock.kv.cache import KVCache, TokenHashes
from penstock.kv.host import HostBlocks

BLOCK = 4


def hashes_of(tokens: list[int]) -> TokenHashes:
    found = TokenHashes("", BLOCK)
    found.extend(tokens)
    return found


def fill(cache: KVCache, tokens: list[int]) -> list[tuple[int, int]]:
    """Compute a prompt and let it go; what had to be copied for it."""
    hashes = hashes_of(tokens)
    match = cache.match(hashes, tokens, limit=len(tokens) - 1)
    table = cache.acquire(match, len(tokens), hashes, tokens)
    assert table is not None
    table.publish(hashes, tokens, len(tokens))
    table.release()
    return cache.pool.take_moves()


def test_a_block_that_is_reused_goes_to_the_host_and_is_found_there() -> None:
    cache = KVCache(4, BLOCK, host_blocks=8)
    first, second = list(range(16)), list(range(100, 116))
    assert fill(cache, first) == []
    saved = fill(cache, second)
    assert sorted(source for source, _ in saved) == [0, 1, 2, 3]
    assert all(4 <= destination < 12 for _, destination in saved)
    match = cache.match(hashes_of(first), first, limit=15)
    assert (match.block_ids, match.num_tokens) == ((), 12)  # the last token is computed in any case
    assert match.on_host == tuple(hashes_of(first).hashes[:3])


def test_what_comes_back_is_found_on_the_device_at_once_and_stays_on_the_host() -> None:
    cache = KVCache(4, BLOCK, host_blocks=8)
    first = list(range(16))
    fill(cache, first)
    fill(cache, list(range(100, 116)))
    assert cache.pool.host is not None
    where = {own: cache.pool.host._ids[own] for own in hashes_of(first).hashes}
    moves = fill(cache, first)
    loads = [move for move in moves if move[0] >= 4]
    assert [source for source, _ in loads] == [where[own] for own in hashes_of(first).hashes[:3]]
    assert cache.pool.host.num_loaded == 3
    assert cache.match(hashes_of(first), first, limit=15).block_ids == tuple(target for _, target in loads)
    assert all(own in cache.pool.host for own in hashes_of(first).hashes)
    order = [move[0] >= 4 for move in moves]
    assert order == sorted(order)  # what is in the way is saved before anything is put there


def test_what_is_kept_meanwhile_does_not_overwrite_what_is_being_fetched() -> None:
    cache = KVCache(4, BLOCK, host_blocks=4)
    first = list(range(16))
    fill(cache, first)
    fill(cache, list(range(100, 116)))
    moves = fill(cache, first)  # the host is full, and four blocks go out while three come in
    sources = {source for source, _ in moves if source >= 4}
    assert not sources & {target for _, target in moves}


def test_what_may_not_have_been_copied_is_not_found() -> None:
    cache = KVCache(4, BLOCK, host_blocks=8)
    first = list(range(16))
    fill(cache, first)
    moves = fill(cache, list(range(100, 116)))
    cache.undo(moves)
    assert cache.match(hashes_of(first), first, limit=15).num_tokens == 0
    assert cache.pool.host is not None
    assert len(cache.pool.host._free) == 8
    fill(cache, first)
    fill(cache, list(range(200, 216)))
    hashes = hashes_of(first)
    table = cache.acquire(cache.match(hashes, first, limit=15), 16, hashes, first)
    assert table is not None
    cache.undo(cache.pool.take_moves())
    assert all(cache.pool.find(own) is None for own in hashes.hashes[:3])
    table.release()
    assert cache.pool.num_free == 4


def test_a_device_that_computes_faster_than_it_copies_keeps_nothing() -> None:
    host = HostBlocks(8, 4, block_size=BLOCK, copy_s=0.010)
    assert host.pays
    host.observe(100, 0.1)  # four tokens take 4 ms
    assert not host.pays
    assert host.keep(b"a", b"") is None
    for _ in range(50):
        host.observe(100, 1.0)  # and now 40
    assert host.pays
    assert host.keep(b"a", b"") is not None


def test_neither_copies_nor_decodes_make_computing_look_slow() -> None:
    host = HostBlocks(8, 4, block_size=BLOCK, copy_s=0.010)
    host.observe(100, 0.1)  # four tokens take 4 ms
    for _ in range(50):
        host.observe(100, 0.1 + 0.9, num_loaded=90)
        host.observe(10, 0.1, num_decodes=90)
        host.observe(1, 0.1, num_loaded=90)  # copies that were faster than they are said to be
    assert not host.pays


def test_without_a_tier_nothing_is_moved() -> None:
    cache = KVCache(4, BLOCK)
    for start in (0, 100, 0):
        assert fill(cache, list(range(start, start + 16))) == []
    assert KVCache(4, BLOCK, host_blocks=8, share_prefixes=False).pool.host is None


names = st.integers(0, 11).map(lambda number: bytes([number]))


@given(st.lists(st.tuples(st.sampled_from(["keep", "fetch"]), names)), st.integers(1, 6))
def test_no_block_leaks(calls: list[tuple[str, bytes]], num_blocks: int) -> None:
    host = HostBlocks(num_blocks, 100, block_size=BLOCK)
    for call, own in calls:
        if call == "keep":
            host.keep(own, b"")
        elif own in host:
            host.put_back(own, b"", host.take(own))
        ids = [*host._ids.values(), *host._free]
        assert sorted(ids) == list(range(100, 100 + num_blocks))
        assert set(host.following(b"")) == set(host._ids)
