"""Blocks on disk: what is written, what comes back, and for how long anybody waits."""

from __future__ import annotations

from penstock.core.tiers import Tier
from penstock.engine.fake import FakeRunner
from penstock.engine.fake_disk import FakeDisk
from penstock.kv.cache import KVCache, PrefixMatch
from penstock.kv.disk import DiskBlocks
from tests.kv.test_host import BLOCK, fill, hashes_of

FIRST, SECOND, THIRD = ([start + i for i in range(16)] for start in (0, 100, 200))


def make(host_blocks: int = 4, disk_blocks: int = 20, routing: int = 0) -> tuple[KVCache, FakeDisk, DiskBlocks]:
    cache = KVCache(4, BLOCK, host_blocks=host_blocks, routing_tokens=routing)
    files = FakeDisk(FakeRunner(4, BLOCK, host_blocks=host_blocks), disk_blocks)
    cache.keep_on_disk(files)
    assert cache.disk is not None
    return cache, files, cache.disk


def run(cache: KVCache, files: FakeDisk, tokens: list[int]) -> None:
    """Compute a prompt; the step ends, and all is written that can be."""
    cache.settle(fill(cache, tokens))
    work(cache, files)


def work(cache: KVCache, files: FakeDisk, now: float = 0.0) -> None:
    while files.num_jobs:
        files.do_all()
        cache.poll(now)


def match(cache: KVCache, tokens: list[int]) -> PrefixMatch:
    return cache.match(hashes_of(tokens), tokens, limit=len(tokens) - 1)


def test_what_host_memory_has_no_room_for_is_found_on_disk_and_read_into_it() -> None:
    cache, files, disk = make()
    for tokens in (FIRST, SECOND, THIRD):
        run(cache, files, tokens)
    found = match(cache, FIRST)
    assert (found.num_tokens, found.on_host, found.num_beyond) == (0, (), 3)
    hashes = hashes_of(FIRST)
    assert cache.fetch(found, hashes, 0.0)
    assert match(cache, FIRST).is_pending
    assert disk.is_reading
    work(cache, files)
    after = match(cache, FIRST)
    assert after.on_host + tuple(hashes.hashes[2:3]) * (after.num_beyond > 0) == tuple(hashes.hashes[:3])
    assert disk.counters.loaded_blocks == 2  # half of the host's blocks, at most
    assert not cache._pending


def test_nothing_is_written_before_the_step_that_saves_it_has_ended() -> None:
    cache, files, _ = make()
    fill(cache, FIRST)
    moves = fill(cache, SECOND)
    assert files.num_jobs == 0
    cache.settle(moves)
    assert files.num_jobs == 1  # a quarter of the host's blocks at once


def test_a_step_that_fails_writes_nothing() -> None:
    cache, files, disk = make()
    fill(cache, FIRST)
    cache.undo(fill(cache, SECOND))
    assert files.num_jobs == 0
    assert not disk.is_writing


def test_a_block_that_two_steps_in_flight_save_to_is_written_after_the_second() -> None:
    cache, files, _ = make(host_blocks=4)
    fill(cache, FIRST)
    early = fill(cache, SECOND)
    late = fill(cache, THIRD)  # into the same blocks of the host
    assert {there for _, there in early} == {there for _, there in late}
    cache.settle(early)
    assert files.num_jobs == 0
    cache.settle(late)
    files.do_all()
    assert set(files.files) <= set(hashes_of(SECOND).hashes)


def test_a_block_that_is_being_written_is_not_overwritten_and_what_is_not_written_in_time_is_dropped() -> None:
    cache, _, disk = make(host_blocks=4)
    fill(cache, FIRST)
    moves = fill(cache, SECOND)
    cache.settle(moves)  # one write is on its way
    (pinned,) = (block for block, _ in disk._writing.values())
    later = fill(cache, THIRD)
    assert pinned + 4 not in {there for _, there in later}
    assert disk.counters.dropped_blocks == 3 + 1  # of the first prompt, and one of the second, which had just come


def test_a_read_does_not_go_where_a_step_in_flight_copies_from_or_to() -> None:
    cache, files, _disk = make(host_blocks=4)
    for tokens in (FIRST, SECOND, THIRD):
        run(cache, files, tokens)
    fill(cache, FIRST)  # its moves have not ended: all of the host's blocks are in them
    assert match(cache, SECOND).num_beyond > 0
    assert not cache.fetch(match(cache, SECOND), hashes_of(SECOND), 0.0)


def test_a_read_that_fails_is_forgotten_and_the_sequence_computes() -> None:
    cache, files, disk = make()
    for tokens in (FIRST, SECOND, THIRD):
        run(cache, files, tokens)
    assert cache.fetch(match(cache, FIRST), hashes_of(FIRST), 0.0)
    while files.num_jobs:
        files.do_job(succeeds=False)
    cache.poll(0.0)
    found = match(cache, FIRST)
    assert not found.is_pending
    assert (found.on_host, found.num_beyond) == ((), 0)
    assert disk.counters.loaded_blocks == 0
    host = cache.pool.host
    assert host is not None
    assert len(host._free) == 2  # what was claimed is free again


def test_nobody_waits_longer_than_computing_takes_and_nothing_more_is_read_meanwhile() -> None:
    cache, files, disk = make()
    for tokens in (FIRST, SECOND, THIRD):
        run(cache, files, tokens)
    cache.observe(4, 10.0)  # a block takes ten seconds to compute, and three are wanted
    assert cache.fetch(match(cache, FIRST), hashes_of(FIRST), 100.0)
    cache.poll(129.0)
    assert match(cache, FIRST).is_pending
    cache.poll(130.0)
    assert not match(cache, FIRST).is_pending
    assert not disk.is_reading
    assert disk.counters.late_blocks == 2
    assert not cache.fetch(match(cache, FIRST), hashes_of(FIRST), 130.0)
    work(cache, files, 131.0)  # it comes after all, and is kept
    assert disk.counters.loaded_blocks == 2
    assert len(match(cache, FIRST).on_host) == 2
    assert not cache._pending


def test_a_disk_that_is_slower_than_computing_is_left_alone_but_for_a_try_now_and_then() -> None:
    cache, files, disk = make()
    for tokens in (FIRST, SECOND, THIRD):
        run(cache, files, tokens)
    files.read_s = 1.0
    assert cache.fetch(match(cache, FIRST), hashes_of(FIRST), 0.0)
    work(cache, files)
    assert disk.pays
    for _ in range(50):
        cache.observe(1000, 1.0)
    assert not disk.pays
    files.read_s = 1e-9
    tries = 0
    for _ in range(2000):
        if cache.fetch(match(cache, SECOND), hashes_of(SECOND), 0.0):
            tries += 1
            work(cache, files)
            run(cache, files, FIRST)
            run(cache, files, THIRD)
        if disk.pays:
            break
    assert disk.pays
    assert tries > 1


def test_the_block_used_longest_ago_gives_way_on_disk() -> None:
    cache, files, disk = make(host_blocks=8, disk_blocks=5)
    for tokens in (FIRST, SECOND, THIRD):
        run(cache, files, tokens)
    assert len(disk) == len(files.files) == 5
    assert set(files.files) == set(disk._index)
    assert hashes_of(SECOND).hashes[0] in disk


def test_files_of_an_earlier_engine_are_found_and_told_to_gateways_as_on_the_host() -> None:
    cache, files, _ = make(routing=8)
    for tokens in (FIRST, SECOND, THIRD):
        run(cache, files, tokens)
    assert cache.routing is not None
    cache.routing.changes()
    named = {cache.routing.name_of(own) for own in hashes_of(FIRST).hashes} - {None}
    assert len(named) == 2

    later = KVCache(4, BLOCK, host_blocks=4, routing_tokens=8)
    later.keep_on_disk(files.restart(FakeRunner(4, BLOCK, host_blocks=4)))
    later.poll(0.0)
    assert match(later, FIRST).num_beyond == 3
    assert later.routing is not None
    changes = later.routing.changes()
    assert changes is not None
    assert not changes.stored
    assert named <= set(changes.on_host)
    assert later.pool.tier_of_run(hashes_of(FIRST).hashes[1], 2) is Tier.HOST
    assert later.disk is not None
    restarted = later.disk.files
    assert isinstance(restarted, FakeDisk)
    for own in list(restarted.files):
        restarted.expire(own)
    later.poll(0.0)
    changes = later.routing.changes()
    assert changes is not None
    assert named <= set(changes.removed)
    assert len(later.disk) == 0


def test_a_parked_engine_finds_its_prompts_on_disk_when_it_wakes() -> None:
    cache, files, _ = make()
    for tokens in (FIRST, SECOND, THIRD):
        run(cache, files, tokens)
    cache.clear()
    assert match(cache, FIRST).num_beyond == 3
    assert cache.fetch(match(cache, FIRST), hashes_of(FIRST), 0.0)
    cache.clear()  # also while blocks are being read
    work(cache, files)
    assert len(match(cache, FIRST).on_host) == 2
