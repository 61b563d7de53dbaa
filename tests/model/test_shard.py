from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ModelUnsupported
from penstock.model.shard import Axis, Shard


@given(st.integers(1, 16), st.integers(1, 12), st.integers(1, 64))
def test_ranks_have_all_of_an_axis_and_no_unit_is_cut(size: int, each: int, unit: int) -> None:
    axis = Axis(size * each * unit, unit)
    spans = [Shard(rank, size).span(axis, "it") for rank in range(size)]
    assert [index for span in spans for index in span] == list(range(axis.size))
    assert all(span.start % unit == 0 and len(span) == each * unit for span in spans)


@given(st.integers(1, 8), st.integers(1, 8))
def test_fewer_heads_of_keys_than_ranks_are_had_by_several(heads: int, times: int) -> None:
    axis, size = Axis(heads * 16, 16, repeats=True), heads * times
    spans = [Shard(rank, size).span(axis, "it") for rank in range(size)]
    assert [span.start // 16 for span in spans] == [head for head in range(heads) for _ in range(times)]
    assert all(len(span) == 16 for span in spans)


@pytest.mark.parametrize(("axis", "size"), [(Axis(30), 4), (Axis(2 * 16, 16), 4), (Axis(6 * 16, 16, repeats=True), 4)])
def test_what_cannot_be_shared_out_evenly_is_refused_by_name(axis: Axis, size: int) -> None:
    with pytest.raises(ModelUnsupported, match=f"the heads cannot be split over {size} ranks.*ranks that work: 1, 2"):
        Shard(1, size).span(axis, "the heads")


@given(st.integers(1, 8), st.integers(1, 24), st.integers(1, 5))
def test_heads_stay_with_their_keys_where_ranks_have_unequal_numbers(size: int, num_kv_heads: int, group: int) -> None:
    if num_kv_heads <= size:
        return
    queries, keys = Axis(num_kv_heads * group * 16, 16, group=group), Axis(num_kv_heads * 16, 16, repeats=True, group=1)
    shards = [Shard(rank, size) for rank in range(size)]
    spans = [(shard.span(queries, "queries"), shard.span(keys, "keys")) for shard in shards]
    assert [index for span, _ in spans for index in span] == list(range(queries.size))
    assert [index for _, span in spans for index in span] == list(range(keys.size))
    assert all(own.start == span.start * group and len(own) == len(span) * group for own, span in spans)
    counts = [len(span) for _, span in spans]
    assert max(counts) - min(counts) <= 16
    assert counts == sorted(counts), "the first has a scheduler to run"


@given(st.integers(1, 9), st.integers(1, 1000))
def test_every_token_of_a_vocabulary_is_one_ranks(size: int, vocab_size: int) -> None:
    spans = [Shard(rank, size).vocabulary(vocab_size) for rank in range(size)]
    assert [token for span in spans for token in span] == list(range(vocab_size))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_ranks_that_share_out_tokens_have_the_same_keys_and_all_queries_of_these(
    num_groups: int, sp: int, each: int, queries: int
) -> None:
    size, group = num_groups * sp, sp * queries  # queries of a key
    num_keys = num_groups * each
    keys = Axis(num_keys * 8, 8, repeats=True, group=1, are_heads=True)
    heads = Axis(num_keys * group * 8, 8, group=group, are_heads=True)
    shards = [Shard(rank, size, sp) for rank in range(size)]
    assert [index for shard in shards for index in shard.span(heads, "it")] == list(range(heads.size))
    for shard in shards:
        own = shard.span(keys, "it")
        near = [shards[rank].span(heads, "it") for rank in shard.neighbours]
        assert all(shards[rank].span(keys, "it") == own for rank in shard.neighbours)
        assert (near[0].start, near[-1].stop) == (own.start * group, own.stop * group)
        assert shard.neighbours[shard.tokens.place] == shard.rank
