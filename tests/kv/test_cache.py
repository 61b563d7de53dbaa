from penstock.kv.cache import BlockTable, KVCache, TokenHashes


def hashes_of(tokens: list[int], namespace: str = "", block_size: int = 4) -> TokenHashes:
    hashes = TokenHashes(namespace, block_size)
    hashes.extend(tokens)
    return hashes


def own(cache: KVCache, tokens: list[int], namespace: str = "") -> BlockTable:
    hashes = hashes_of(tokens, namespace)
    table = cache.acquire(cache.match(hashes, tokens, len(tokens) - 1), len(tokens), hashes)
    assert table is not None
    return table


PROMPT = list(range(10))


def test_a_computed_prefix_is_shared_and_its_tail_is_copied() -> None:
    cache = KVCache(16, 4)
    table = own(cache, PROMPT)
    table.publish(hashes_of(PROMPT), PROMPT, len(PROMPT))
    sibling = [*PROMPT[:6], 99, 98]
    match = cache.match(hashes_of(sibling), sibling, len(sibling) - 1)
    assert match.block_ids == (table.block_ids[0],)
    assert match.num_tokens == 6
    assert match.partial_block == table.block_ids[1]


def test_the_whole_prompt_is_never_taken_from_the_cache() -> None:
    cache = KVCache(16, 4)
    tokens = list(range(8))
    table = own(cache, tokens)
    table.publish(hashes_of(tokens), tokens, 8)
    match = cache.match(hashes_of(tokens), tokens, limit=7)
    assert match.num_tokens == 7  # one token is left to compute, in a copy of the last block


def test_another_namespace_finds_nothing() -> None:
    cache = KVCache(16, 4)
    own(cache, PROMPT, "acme").publish(hashes_of(PROMPT, "acme"), PROMPT, len(PROMPT))
    assert cache.match(hashes_of(PROMPT, "acme"), PROMPT, 9).num_tokens == 8
    for stranger in ("", "acme2", "ACME"):
        match = cache.match(hashes_of(PROMPT, stranger), PROMPT, 9)
        assert (match.num_tokens, match.is_pending, match.partial_block) == (0, False, None)


def test_a_prefix_that_is_being_computed_is_pending_until_published_or_given_up() -> None:
    cache = KVCache(16, 4)
    table = own(cache, PROMPT)
    assert cache.match(hashes_of(PROMPT), PROMPT, 9).is_pending
    table.publish(hashes_of(PROMPT), PROMPT, 4)
    assert cache.match(hashes_of(PROMPT), PROMPT, 9).is_pending
    table.publish(hashes_of(PROMPT), PROMPT, 8)
    assert cache.match(hashes_of(PROMPT), PROMPT, 9).num_tokens == 8
    other = own(cache, [7] * 10)
    other.release()
    assert not cache.match(hashes_of([7] * 10), [7] * 10, 9).is_pending


def test_acquire_takes_nothing_when_there_is_no_room() -> None:
    cache = KVCache(3, 4)
    table = own(cache, PROMPT[:5])
    hashes = hashes_of([7] * 8)
    assert cache.acquire(cache.match(hashes, [7] * 8, 7), 8, hashes) is None
    assert cache.pool.num_free == 1
    assert not table.grow(13)
    assert len(table.block_ids) == 2
    table.release()
    assert cache.pool.num_free == 3


def test_a_cached_block_is_not_counted_as_room_for_its_own_reuse() -> None:
    cache = KVCache(2, 4)
    table = own(cache, [1, 2, 3, 4, 5])
    table.publish(hashes_of([1, 2, 3, 4, 5]), [1, 2, 3, 4, 5], 5)
    table.release()
    tokens = [1, 2, 3, 4, *range(10, 15)]  # needs the cached block and two more, and there is only one
    hashes = hashes_of(tokens)
    assert cache.acquire(cache.match(hashes, tokens, 8), 9, hashes) is None
    assert cache.pool.num_free == 2
