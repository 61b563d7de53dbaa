"""Tokens of a sequence on several ranks: each is kept once, and merging what ranks found is attention over all."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.model.ops.reference import attend_part
from penstock.model.sequence import TokenSplit, merged, packed
from tests.examples import examples


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 70))
def test_every_token_is_kept_by_one_rank_in_the_block_of_its_number(size: int, block_size: int, count: int) -> None:
    positions = torch.arange(count)
    splits = [TokenSplit(place, size) for place in range(size)]
    keepers = torch.stack([split.keeps(positions, block_size) for split in splits])
    assert keepers.sum(dim=0).tolist() == [1] * count
    assert sum(int(split.kept(torch.tensor(count), block_size)) for split in splits) == count
    for split, own in zip(splits, keepers, strict=True):
        places = split.kept(positions, block_size)[own]
        assert places.tolist() == list(range(len(places))), "they lie behind each other"
        assert torch.equal(places // block_size, positions[own] // (block_size * size)), "in the table's block"
        assert torch.equal(places % block_size, positions[own] % block_size)


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 70))
def test_a_query_sees_what_was_kept_until_it(size: int, block_size: int, position: int) -> None:
    for place in range(size):
        split = TokenSplit(place, size)
        seen = split.keeps(torch.arange(position + 1), block_size).sum()
        assert split.kept(torch.tensor(position + 1), block_size) == seen
        inside = position % (block_size * size) + 1 - place * block_size
        assert seen == position // (block_size * size) * block_size + min(max(inside, 0), block_size)


def attended(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
    """[tokens, heads * dim] and [tokens, heads], of q, k and v [tokens, heads, dim]."""
    found, lse = attend_part(*(each.transpose(0, 1)[None] for each in (q, k, v)), seen[None, None], 0.3, cap)
    assert lse is not None
    return found[0].transpose(0, 1).flatten(1), lse[0].transpose(0, 1)


@settings(max_examples=examples(40))
@given(
    size=st.integers(2, 4),
    block_size=st.integers(1, 4),
    count=st.integers(1, 30),
    window=st.none() | st.integers(1, 12),
    cap=st.none() | st.just(2.0),
    seed=st.integers(0, 1000),
)
def test_parts_that_are_merged_are_the_whole(
    size: int, block_size: int, count: int, window: int | None, cap: float | None, seed: int
) -> None:
    """Of queries at every position: the first ones see nothing of most ranks."""
    num_heads, generator = 2, torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(count, size * num_heads, 8, generator=generator) for _ in range(3))
    positions = torch.arange(count)
    seen = positions <= positions[:, None]
    if window is not None:
        seen &= positions > positions[:, None] - window
    whole, _ = attended(q, k, v, seen, cap)
    found = []
    for place in range(size):
        own = TokenSplit(place, size).keeps(positions, block_size)
        if own.any():
            out, lse = attended(q, k[own], v[own], seen[:, own], cap)
        else:
            out, lse = torch.zeros_like(whole), torch.full((count, size * num_heads), -torch.inf)
        assert not out.isnan().any()
        found.append(packed(out, lse, size))
    for rank in range(size):  # which gets its own heads' parts of all
        parts = torch.stack([each[rank] for each in found])
        heads = merged(parts, num_heads)
        torch.testing.assert_close(heads, whole[:, rank * num_heads * 8 : (rank + 1) * num_heads * 8])
        assert torch.equal(heads, merged(parts.clone(), num_heads))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_that_sees_nothing_anywhere_is_no_nan(dtype: torch.dtype) -> None:
    """As padding does: zeros, whatever was left in memory."""
    parts = packed(torch.zeros(3, 8, dtype=dtype), torch.full((3, 4), -torch.inf), 2)
    assert torch.equal(merged(parts, 2), torch.zeros(3, 4, dtype=dtype))


def test_sums_keep_their_bits_beside_halves() -> None:
    lse = torch.tensor([[0.1, -7.3, 1e-20, 88.7]])
    out = torch.tensor([[1.5, -2.0, 3.25, 0.5]], dtype=torch.bfloat16)
    parts = packed(out, lse, 2)
    assert parts.shape == (2, 1, 2 + 2 * 2)
    alone = [torch.stack([part, torch.zeros_like(part)]) for part in parts]
    for part, empty in zip(parts, alone, strict=True):
        empty[1, :, 2:] = torch.full((1, 2), -torch.inf).view(torch.bfloat16)
        assert torch.equal(merged(empty, 2), part[:, :2])
