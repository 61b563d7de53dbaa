"""Shared prefixes of a step's decodes: which begin with the same blocks, and how the device reads those once for all.

Integers in, integers out: it has never seen a tensor. It runs in every step, before the device can start, so it is
nearly free where nothing is shared.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Rows = npt.NDArray[np.intp]

MIN_MEMBERS = 8  # of a group: a tile of fewer leaves most of its rows empty
_MIN_GROUP_SAVES = 1024  # tokens: handing over partial results costs what reading some dozens of tokens does
_MIN_STEP_SAVES = 16_384  # tokens: in a layer of 8B, what can be read in the time that one more launch takes
_MIN_PIECE = 256  # tokens: partial results are to stay small beside what they are made of


@dataclass(frozen=True)
class Group:
    """Decodes whose tables begin with the same blocks."""

    members: Rows  # of the tables
    num_blocks: int

    @property
    def saves(self) -> int:
        """Blocks that need not be read."""
        return (len(self.members) - 1) * self.num_blocks


def find_groups(tables: Ints, full: Ints) -> list[Group]:
    """Groups that save the most; no sequence is in two. `full` says how many leading blocks of each table are full."""
    return _parts(tables, full, np.arange(len(full)), 0, must_save=0)


def _parts(tables: Ints, full: Ints, members: Rows, depth: int, *, must_save: int) -> list[Group]:
    """The best groups of those that share more than `depth` blocks; none if they cannot save more than `must_save`."""
    members = members[full[members] > depth]
    column = tables[members, depth]
    if len(column) - len(set(column.tolist())) < MIN_MEMBERS - 1:  # as in most steps: the rest is dearer
        return []
    blocks, counts = np.unique(column, return_counts=True)
    blocks, counts = blocks[counts >= MIN_MEMBERS], counts[counts >= MIN_MEMBERS]
    if (counts - 1).sum() * full[members].max(initial=0) <= must_save:
        return []
    parts = [group for block in blocks for group in _best(tables, full, members[column == block], depth + 1)]
    return parts if sum(part.saves for part in parts) > must_save else []


def _best(tables: Ints, full: Ints, members: Rows, depth: int) -> list[Group]:
    """Members share `depth` blocks or more: one group of all, or several that are smaller and share more."""
    rest = tables[members, depth : full[members].min()]
    differs = (rest != rest[0]).any(axis=0)
    common = depth + (int(differs.argmax()) if differs.any() else len(differs))
    whole = Group(members, common)
    return _parts(tables, full, members, common, must_save=whole.saves) or [whole]


@dataclass(frozen=True)
class Room:
    """Room for the prefixes that a step of some size shares: a captured graph must have room for all such steps."""

    sequences: int
    tile: int  # sequences whose queries are one tile
    wanted: int  # pieces that fill the device

    @property
    def tiles(self) -> int:
        """Each group may leave one that is not full."""
        return self.sequences // self.tile + self.sequences // MIN_MEMBERS

    @property
    def pieces(self) -> int:
        return self.wanted + self.tiles

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Shapes of the arrays of `SharedViews`."""
        return (self.sequences, 3), (self.tiles, self.tile), (self.pieces, 3)


@dataclass(frozen=True)
class SharedViews:
    """Arrays to be written that are `model.batch.SharedPrefixes` on the device."""

    sequences: Ints
    tiles: Ints
    pieces: Ints


def share(tables: Ints, positions: Ints, block_size: int, views: SharedViews) -> bool:
    """Write what the decodes at `positions` share; False if it does not pay. A block being written is never shared."""
    groups = [g for g in find_groups(tables, positions // block_size) if g.saves * block_size >= _MIN_GROUP_SAVES]
    pays = sum(group.saves for group in groups) * block_size >= _MIN_STEP_SAVES
    if pays:
        write_shared(groups, block_size, views)
    return pays


def write_shared(groups: list[Group], block_size: int, views: SharedViews) -> None:
    """Put members into tiles, and cut each tile's prefix into pieces: enough to fill the device, but none too small."""
    views.sequences[:] = 0
    views.tiles[:] = -1
    views.pieces[:] = 0
    size = views.tiles.shape[1]
    wanted = len(views.pieces) - len(views.tiles)
    to_read = sum(-(-len(group.members) // size) * group.num_blocks for group in groups)
    tile = piece = 0
    for group in groups:
        num_tiles = -(-len(group.members) // size)
        num_pieces = min(wanted * group.num_blocks // to_read, group.num_blocks * block_size // _MIN_PIECE)
        length = -(-group.num_blocks // max(num_pieces, 1))  # in blocks: no tile of keys may span two
        begins = np.arange(0, group.num_blocks, length)
        num_pieces = len(begins)
        views.tiles[tile : tile + num_tiles].reshape(-1)[: len(group.members)] = group.members
        cut = views.pieces[piece : piece + num_tiles * num_pieces].reshape(num_tiles, num_pieces, 3)
        cut[:, :, 0] = np.arange(tile, tile + num_tiles)[:, None]
        cut[:, :, 1] = begins * block_size
        cut[:, :, 2] = np.minimum(begins + length, group.num_blocks) * block_size
        theirs, place = np.divmod(np.arange(len(group.members)), size)
        first = (piece + theirs * num_pieces) * size + place
        views.sequences[group.members, 0] = group.num_blocks * block_size
        views.sequences[group.members, 1] = first
        views.sequences[group.members, 2] = num_pieces
        tile += num_tiles
        piece += num_tiles * num_pieces
