from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.capacity.offline import EngineLimits, steps

ROOMY = EngineLimits(max_num_seqs=4, chunk_tokens=32, kv_tokens=10**6)
lengths = st.lists(st.tuples(st.integers(9, 100), st.integers(1, 20)), min_size=1, max_size=8)


@given(lengths=lengths, shared=st.integers(0, 8))
def test_every_token_is_computed_once(lengths: list[tuple[int, int]], shared: int) -> None:
    taken = list(steps(lengths, shared, ROOMY))
    assert sum(tokens for tokens, *_ in taken) == sum(p for p, _ in lengths) - shared * (len(lengths) - 1)
    assert sum(decodes for _, _, decodes, _ in taken) == sum(output - 1 for _, output in lengths)
    assert all(tokens + decodes <= 32 and decodes <= 4 for tokens, _, decodes, _ in taken)


@given(lengths=lengths)
def test_with_little_room_it_still_ends_and_computes_again_what_gave_way(lengths: list[tuple[int, int]]) -> None:
    tight = EngineLimits(max_num_seqs=4, chunk_tokens=32, kv_tokens=120)
    taken = list(steps(lengths, 0, tight))
    ends = sum(output - 1 for _, output in lengths)
    assert sum(tokens for tokens, *_ in taken) >= sum(prompt for prompt, _ in lengths)
    assert ends - len(lengths) * 20 <= sum(decodes for _, _, decodes, _ in taken) <= ends


def test_shared_context_is_read_once_by_those_who_can() -> None:
    limits = EngineLimits(max_num_seqs=4, chunk_tokens=1000, kv_tokens=10**6, reads_shared_once=True)
    *_, last = steps([(100, 2)] * 3, 90, limits)
    assert last == (0, 0, 3, 3 * 101 - 2 * 90)
