from penstock.core.hashing import root_hash
from penstock.kv.pool import BlockPool
from tests.kv.test_token_hashes import hashes_of


def publish(pool: BlockPool, tokens: list[int], namespace: str = "") -> list[int]:
    """Blocks that hold `tokens`, published and held."""
    size = pool.block_size
    hashes = hashes_of(namespace, tokens, size)
    blocks = pool.allocate(len(hashes))
    assert blocks is not None
    for i, (block, own) in enumerate(zip(blocks, hashes, strict=True)):
        parent = hashes[i - 1] if i else root_hash(namespace)
        pool.publish(block, own, parent, tokens[i * size : (i + 1) * size])
    return blocks


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4, 2)
    assert pool.allocate(5) is None
    assert pool.num_free == 4
    assert len(pool.allocate(4) or []) == 4
    assert pool.allocate(1) is None


def test_a_released_block_can_be_found_until_it_is_reused() -> None:
    pool = BlockPool(3, 2)
    blocks = publish(pool, [1, 2])
    pool.release(blocks)
    (own,) = hashes_of("", [1, 2], 2)
    assert pool.find(own) == blocks[0]
    assert pool.num_free == 3
    pool.allocate(3)
    assert pool.find(own) is None
    assert pool.counters.evictions == 1


def test_blocks_without_content_are_reused_before_cached_ones() -> None:
    pool = BlockPool(3, 2)
    cached = publish(pool, [1, 2])
    plain = pool.allocate(2)
    assert plain is not None
    pool.release(cached)
    pool.release(plain)
    assert set(pool.allocate(2) or []) == set(plain)


def test_a_prefix_outlives_its_continuation() -> None:
    pool = BlockPool(2, 2)
    blocks = publish(pool, [1, 2, 3, 4])
    pool.release(blocks)
    pool.allocate(1)
    first, second = hashes_of("", [1, 2, 3, 4], 2)
    assert pool.find(first) is not None
    assert pool.find(second) is None


def test_of_two_equal_blocks_the_older_is_found() -> None:
    pool = BlockPool(4, 2)
    older = publish(pool, [1, 2])
    publish(pool, [1, 2])
    assert pool.find(hashes_of("", [1, 2], 2)[0]) == older[0]


def test_a_partial_match_gives_the_block_that_agrees_longest() -> None:
    pool = BlockPool(4, 4)
    publish(pool, [1, 2, 3, 4])
    longer = publish(pool, [1, 2, 9, 9])
    assert pool.find_partial(root_hash(""), [1, 2, 9, 7]) == (longer[0], 3)
    assert pool.find_partial(root_hash(""), [8, 8]) is None
    assert pool.find_partial(root_hash("other"), [1, 2, 3]) is None
