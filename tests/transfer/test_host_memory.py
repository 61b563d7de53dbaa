"""Bytes of blocks in host memory: C copies and verifies them as Python does."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import struct
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from penstock.link.connection import Disconnected
from penstock.model.ops import LayerKV
from penstock.model.ops.library import load_library
from penstock.model.ops.memory import release
from penstock.runner.kv_memory import NativeTools, SharedCache, byte_tools, host_memory
from penstock.runner.kv_memory import parts_of as parts_of_cache
from penstock.transfer.host_memory import ByteTools, HostMemory, Parts, PlainTools
from tests.transfer.fakes import layout_of

SIZES = (1, 7, 32, 37, 100, 6144)  # bytes of a block: with and without whole words and stripes


def parts_of(num_blocks: int, sizes: Sequence[int] = SIZES, seed: int = 0) -> Parts:
    dice = random.Random(seed)
    return Parts([memoryview(bytearray(dice.randbytes(num_blocks * size))) for size in sizes], sizes)


def piece(parts: Parts, block_id: int) -> list[bytes]:
    """A block, part by part."""
    sizes = parts.sizes.tolist()
    return [bytes(whole[block_id * n : (block_id + 1) * n]) for whole, n in zip(parts.wholes, sizes, strict=True)]


@pytest.fixture(params=["plain", "native"])
def tools(request: pytest.FixtureRequest) -> ByteTools:
    return PlainTools() if request.param == "plain" else NativeTools(load_library())


def test_a_compiler_gives_the_faster_tools() -> None:
    assert isinstance(byte_tools(), NativeTools)


def test_blocks_are_copied_wherever_they_lie(tools: ByteTools) -> None:
    dice = random.Random(1)
    for _ in range(20):
        source, target = parts_of(9, seed=2), parts_of(12, seed=3)
        count = dice.randrange(1, 9)
        theirs, ours = dice.sample(range(9), count), dice.sample(range(12), count)
        before = [bytes(whole) for whole in target.wholes]
        tools.copy(source, theirs, target, ours)
        for part, (whole, old) in enumerate(zip(target.wholes, before, strict=True)):
            size = SIZES[part]
            expected = bytearray(old)
            for there, here in zip(theirs, ours, strict=True):
                expected[here * size : (here + 1) * size] = source.wholes[part][there * size : (there + 1) * size]
            assert whole == expected


def test_what_is_sent_and_received_is_verified_and_lands_where_it_belongs(tools: ByteTools) -> None:
    lender, puller = (HostMemory(parts_of(9, seed=seed), layout_of(16), tools) for seed in (4, 5))
    for theirs, ours in (([2, 3, 7], [8, 0, 1]), ([1], [5]), ([8, 4, 3], [2, 3, 4])):
        with lender.reading(theirs) as staged:
            sent, found = b"".join(staged.views), staged.checksum(b"these")
            assert 0 <= found < 1 << 62, "as a message carries it"
            assert staged.checksum(b"those") != found
        with puller.writing(ours) as staged:
            for view in staged.views:
                view[:], sent = sent[: len(view)], sent[len(view) :]
            assert staged.checksum(b"these") == found
        for there, here in zip(theirs, ours, strict=True):
            assert piece(puller.parts, here) == piece(lender.parts, there)


def test_what_is_not_verified_does_not_land(tools: ByteTools) -> None:
    memory = HostMemory(parts_of(9), layout_of(16), tools)
    before = piece(memory.parts, 2)
    with contextlib.suppress(Disconnected), memory.writing([2]) as staged:
        staged.views[0][:] = bytes(len(staged.views[0]))
        raise Disconnected
    assert piece(memory.parts, 2) == before


def test_every_changed_byte_is_noticed(tools: ByteTools) -> None:
    parts = parts_of(2, SIZES[:5])
    found = tools.checksum(parts, [0, 1], b"")
    for whole in parts.wholes:
        for place in range(len(whole)):
            whole[place] ^= 0x10
            assert tools.checksum(parts, [0, 1], b"") != found
            whole[place] ^= 0x10
    assert tools.checksum(parts, [0, 1], b"") == found
    assert tools.checksum(parts, [1, 0], b"") != found


def test_blocks_that_follow_each_other_are_one_piece() -> None:
    parts = parts_of(9, [4])
    assert [len(view) for view in parts.views([3, 4, 5, 1, 8, 7])] == [12, 4, 4, 4]
    assert parts.views([]) == []


@pytest.mark.parametrize("sizes", [(1,), (64,), (63, 65), (1023,), (1024,), (1025, 7), (5000, 1)])
def test_the_hash_is_that_of_its_plain_form(sizes: tuple[int, ...]) -> None:
    parts, ids = parts_of(4, sizes), np.array([2, 0, 1], np.int64)
    pointers = (each.ctypes.data for each in (parts.addresses, ids, parts.sizes))
    pieces = [piece(parts, block_id)[part] for part in range(len(sizes)) for block_id in ids.tolist()]
    assert load_library().kv_hash(*pointers, len(sizes), len(ids), 20) == plain_hash(pieces, 20)


def plain_hash(pieces: Sequence[bytes], seed: int) -> int:
    """`kv_hash` of kv_bytes.c, word by word."""
    whole = (1 << 64) - 1
    primes = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9

    def mixed(x: int) -> int:
        x = (x ^ x >> 33) * primes[1] & whole
        x = (x ^ x >> 29) * primes[2] & whole
        return x ^ x >> 32

    key = [mixed(seed + (i + 1) * primes[0] & whole) for i in range(24)]
    sums = key[:8]
    padded = b"".join(piece + bytes(-len(piece) % 64) for piece in pieces)
    for stripe in range(len(padded) // 64):
        for lane, word in enumerate(struct.unpack("=8Q", padded[64 * stripe : 64 * stripe + 64])):
            keyed = word ^ key[stripe % 16 + lane]
            sums[lane] = sums[lane] + word + (keyed & 0xFFFFFFFF) * (keyed >> 32) & whole
        if stripe % 16 == 15:
            sums = [(each ^ each >> 47 ^ key[16 + lane]) * primes[0] & whole for lane, each in enumerate(sums)]
    found = seed
    for each in sums:
        found = mixed(found ^ each) * primes[0] + primes[2] & whole
    return mixed(found)


def test_a_cache_that_others_can_map_is_a_cache() -> None:
    shared = SharedCache()
    size, cpu = (6, 16, 2, 8), torch.device("cpu")
    keys, values = (shared.zeros(size, dtype=torch.bfloat16, device=cpu) for _ in range(2))
    assert keys.shape == size
    assert not keys.any()
    keys.fill_(1.0)
    assert not values.any(), "each has memory of its own"
    memory = host_memory(parts_of_cache([LayerKV(keys, values, 16)]), layout_of(16))
    assert memory.layout.block_bytes == 2 * 16 * 2 * 8 * 2
    first, second = shared.file.lend(memory.parts).offsets
    assert 0 < first < second


def test_a_cache_that_others_can_map_is_given_back_when_it_is_parked() -> None:
    shared = SharedCache()
    part = shared.zeros((8 << 20,), dtype=torch.uint8, device=torch.device("cpu")).fill_(1)
    descriptor = shared.file.lend(Parts([], [])).seal()
    before = os.fstat(descriptor).st_blocks
    release([part])
    assert os.fstat(descriptor).st_blocks <= before - (8 << 20) // 512
    assert not part.any()
    part.fill_(2)
    with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as mapped:
        assert b"\2" * 64 in mapped[:], "whoever has mapped it sees what is written afterwards"
    os.close(descriptor)
