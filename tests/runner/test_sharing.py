"""Groups are right, save as much as they can, and what is written for the device covers each of them once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.runner.sharing import MIN_MEMBERS, Room, SharedViews, find_groups, share, write_shared

BLOCK_SIZE = 64


@st.composite
def tables(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Block tables that branch like a tree, and how many of each one's blocks are full."""
    branches = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))  # children at each depth
    runs = draw(st.lists(st.integers(1, 4), min_size=len(branches), max_size=len(branches)))  # blocks of each branch
    count = draw(st.integers(1, 60))
    rows, lengths = [], []
    for i in range(count):
        path: list[int] = []
        row: list[int] = []
        for children, run in zip(branches, runs, strict=True):
            path.append(draw(st.integers(0, children - 1)))
            row += [hash((*path, j)) % 1_000_000 for j in range(run)]
        row += [2_000_000 + 100 * i + j for j in range(draw(st.integers(1, 4)))]  # its own
        rows.append(row)
        lengths.append(draw(st.integers(0, len(row) - 1)))
    found = np.zeros((count, max(map(len, rows))), np.int32)
    for target, row in zip(found, rows, strict=True):
        target[: len(row)] = row
    return found, np.array(lengths, np.int32)


def views(room: Room) -> SharedViews:
    return SharedViews(*(np.full(shape, 77, np.int32) for shape in room.shapes))


@given(tables())
def test_members_share_full_blocks_and_are_in_one_group(drawn: tuple[np.ndarray, np.ndarray]) -> None:
    found, full = drawn
    seen: set[int] = set()
    for group in find_groups(found, full):
        assert len(group.members) >= MIN_MEMBERS
        assert group.num_blocks >= 1
        assert (full[group.members] >= group.num_blocks).all()
        begins = found[group.members, : group.num_blocks]
        assert (begins == begins[0]).all()
        assert seen.isdisjoint(group.members.tolist())
        seen.update(group.members.tolist())


@given(tables())
def test_no_single_cut_of_the_tree_saves_more(drawn: tuple[np.ndarray, np.ndarray]) -> None:
    found, full = drawn
    saved = sum(group.saves for group in find_groups(found, full))
    for depth in range(1, found.shape[1] + 1):
        counts: dict[tuple[int, ...], int] = {}
        for row, length in zip(found.tolist(), full.tolist(), strict=True):
            if length >= depth:
                counts[tuple(row[:depth])] = counts.get(tuple(row[:depth]), 0) + 1
        assert saved >= sum((n - 1) * depth for n in counts.values() if n >= MIN_MEMBERS)


@given(tables(), st.integers(1, 64), st.integers(1, 40))
def test_pieces_cover_what_each_member_shares_once(
    drawn: tuple[np.ndarray, np.ndarray], tile: int, wanted: int
) -> None:
    found, full = drawn
    groups, room = find_groups(found, full), Room(len(full), tile, wanted)
    written = views(room)
    write_shared(groups, BLOCK_SIZE, written)
    shared = {int(member): group.num_blocks * BLOCK_SIZE for group in groups for member in group.members}
    for sequence, (tokens, first, count) in enumerate(written.sequences.tolist()):
        assert tokens == shared.get(sequence, 0)
        covered = 0
        for i in range(count):
            piece, place = divmod(first + i * tile, tile)
            its_tile, begin, end = written.pieces[piece].tolist()
            assert written.tiles[its_tile, place] == sequence
            assert begin == covered
            assert begin % BLOCK_SIZE == end % BLOCK_SIZE == 0
            # The kernel walks the table of the tile's first.
            of, blocks = written.tiles[its_tile, 0], slice(begin // BLOCK_SIZE, end // BLOCK_SIZE)
            assert (found[of, blocks] == found[sequence, blocks]).all()
            covered = end
        assert covered == tokens
    used = written.pieces[:, 2] > written.pieces[:, 1]
    assert not written.pieces[~used].any()


def decodes(prefix_blocks: int, count: int, own_blocks: int) -> tuple[np.ndarray, np.ndarray]:
    own = 1000 + np.arange(count * own_blocks, dtype=np.int32).reshape(count, own_blocks)
    prefix = np.tile(np.arange(prefix_blocks, dtype=np.int32), (count, 1))
    positions = np.full(count, (prefix_blocks + own_blocks) * BLOCK_SIZE - 1, np.int32)
    return np.concatenate((prefix, own), axis=1), positions


def test_long_prefix_of_many_fills_the_device_in_one_wave() -> None:
    room = Room(256, tile=16, wanted=33)  # 132 processors with 2 programs, 8 KV heads
    written = views(room)
    assert share(*decodes(32, 256, 3), BLOCK_SIZE, written)
    begins, ends = written.pieces[:, 1], written.pieces[:, 2]
    assert (ends > begins).sum() == 32
    assert set((ends - begins).tolist()) == {0, 1024}


def test_short_prefix_or_few_members_do_not_pay() -> None:
    for blocks, count, pays in ((2, 256, True), (1, 256, False), (0, 256, False), (100, MIN_MEMBERS - 1, False)):
        tables, positions = decodes(blocks, count, 3)
        assert share(tables, positions, BLOCK_SIZE, views(Room(256, 16, 33))) == pays


def test_block_being_written_is_not_shared() -> None:
    tables, _ = decodes(32, 64, 1)
    inside_the_last = np.full(64, 32 * BLOCK_SIZE - 1, np.int32)
    assert [group.num_blocks for group in find_groups(tables, inside_the_last // BLOCK_SIZE)] == [31]


def test_deeper_groups_are_taken_where_they_save_more() -> None:
    system, conversation = list(range(4)), [list(range(100 * i, 100 * i + 30)) for i in range(1, 4)]
    rows = [system + conversation[i % 3] + [5000 + i] for i in range(48)]
    found = find_groups(np.array(rows, np.int32), np.full(48, 34, np.int32))
    assert sorted((len(group.members), group.num_blocks) for group in found) == [(16, 34)] * 3
    shallow = find_groups(np.array(rows, np.int32), np.full(48, 5, np.int32))
    assert [(len(group.members), group.num_blocks) for group in shallow] == [(16, 5)] * 3
