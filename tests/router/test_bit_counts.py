from collections import Counter

import hypothesis.strategies as st
from hypothesis import given

from penstock.router.bit_counts import BitCounts


@given(st.lists(st.integers(0, (1 << 70) - 1), max_size=40))
def test_it_counts_as_a_counter_does(sets: list[int]) -> None:
    counts, expected = BitCounts(), Counter[int]()
    for members in sets:
        counts.add(members)
        expected.update(i for i in range(70) if members >> i & 1)
    assert all(counts.of(1 << i) == expected[i] for i in range(70))
    assert bool(counts) == bool(expected)
