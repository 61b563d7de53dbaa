"""Blocks between places and memories, on real tensors."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from penstock.model.ops import KVShape, LayerKV, Ops
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.native import NativeOps
from penstock.model.ops.reference import ReferenceOps
from penstock.runner.moving import BlockMover, PlainCopies, runs, stretches, undisturbed

DEVICE, HOST = 5, 4
pairs = st.lists(st.tuples(*[st.integers(0, DEVICE + HOST - 1)] * 2), max_size=12)


def native() -> Ops:
    try:
        return NativeOps("float32", threads=1)
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))


def filled(ops: Ops) -> list[LayerKV]:
    """Each block with bytes of its own."""
    kv = ops.allocate_kv(KVShape(2, DEVICE, 4, 2, 8))
    for number, cache in enumerate(cache for layer in kv for cache in (layer.keys, layer.values)):
        for block in range(DEVICE):
            cache[block].view(torch.uint8).fill_(16 * number + block)
    return kv


@pytest.mark.parametrize("make", [ReferenceOps, native])
def test_copies_happen_in_their_order_whichever_memory_they_are_in(make: type[ReferenceOps]) -> None:
    ops = make()

    @settings(max_examples=60, deadline=None)
    @given(pairs)
    def check(moves: list[tuple[int, int]]) -> None:
        kv = filled(ops)
        mover = BlockMover(ops, kv, PlainCopies(ops, kv, HOST))
        contents: list[int | None] = [*range(DEVICE), *[None] * HOST]  # whose content is where
        moves = [(source, target) for source, target in moves if source < DEVICE or target < DEVICE]
        known = []
        for source, target in moves:
            if contents[source] is not None:  # what was never written is never read
                contents[target] = contents[source]
                known.append((source, target))
        mover.move(known)
        expected = filled(ops)
        for layer, was in zip(kv, expected, strict=True):
            for block, content in enumerate(contents[:DEVICE]):
                assert content is not None
                assert torch.equal(layer.keys[block], was.keys[content])
                assert torch.equal(layer.values[block], was.values[content])

    check()


def test_blocks_come_back_from_the_host_as_they_went() -> None:
    ops = ReferenceOps()
    kv = filled(ops)
    mover = BlockMover(ops, kv, PlainCopies(ops, kv, HOST))
    mover.move([(block, DEVICE + block) for block in range(HOST)])
    for layer in kv:
        layer.keys.zero_()
        layer.values.zero_()
    mover.move([(DEVICE + block, block) for block in range(HOST)])
    for layer, was in zip(kv, filled(ops), strict=True):
        assert torch.equal(layer.keys[:HOST], was.keys[:HOST])
        assert torch.equal(layer.values[:HOST], was.values[:HOST])


@pytest.mark.parametrize("make", [ReferenceOps, native])
def test_the_bytes_of_a_block_on_the_host_are_all_of_it(make: type[ReferenceOps]) -> None:
    ops = make()
    kv = filled(ops)
    copies = PlainCopies(ops, kv, HOST)
    copies.save([(3, 1)])
    taken = [bytes(part) for part in copies.parts(1)]
    assert sum(map(len, taken)) == sum(cache[3].nbytes for layer in kv for cache in (layer.keys, layer.values))
    for part, content in zip(copies.parts(2), taken, strict=True):
        part[:] = content
    copies.load([(2, 0)])
    for layer in kv:
        assert torch.equal(layer.keys[0], layer.keys[3])
        assert torch.equal(layer.values[0], layer.values[3])


def test_copies_that_do_not_meet_go_together() -> None:
    assert list(runs([(0, 1), (2, 3), (0, 4)], 9)) == [[(0, 1), (2, 3), (0, 4)]]
    assert list(runs([(0, 1), (1, 2)], 9)) == [[(0, 1)], [(1, 2)]]
    assert list(runs([(0, 1), (2, 1)], 9)) == [[(0, 1)], [(2, 1)]]
    assert list(runs([(0, 9), (10, 0), (1, 2)], 9)) == [[(0, 9)], [(10, 0)], [(1, 2)]]
    assert list(runs([(0, 0)] * 3, 9)) == [[(0, 0)] * 3]


@pytest.mark.parametrize(
    ("seconds", "least", "tries"),
    [
        ([1.0, 1.1, 9.0], 1.0, 3),
        ([9.0, 50.0, 1.0, 7.0, 1.15], 1.0, 5),
        ([float(3**exponent) for exponent in range(40, 0, -1)], float(3**11), 30),
    ],
)
def test_copies_are_measured_until_two_agree(seconds: list[float], least: float, tries: int) -> None:
    left = iter(seconds)
    assert undisturbed(lambda: next(left)) == least
    assert len(list(left)) == len(seconds) - tries


def test_a_copy_is_measured_and_changes_nothing() -> None:
    ops = ReferenceOps()
    kv = filled(ops)
    assert BlockMover(ops, kv, PlainCopies(ops, kv, HOST)).measure() > 0
    assert all(torch.equal(layer.keys, was.keys) for layer, was in zip(kv, filled(ops), strict=True))


def test_blocks_that_lie_in_one_piece_are_one_copy() -> None:
    assert list(stretches([4, 5, 6, 2, 9, 10])) == [(0, 4, 3), (3, 2, 1), (4, 9, 2)]
    assert list(stretches([7])) == [(0, 7, 1)]
    assert list(stretches([])) == []
