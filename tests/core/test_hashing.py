import hypothesis.strategies as st
from hypothesis import given

from penstock.core.hashing import chain_hashes

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(tokens, tokens, st.integers(1, 8))
def test_hashes_agree_exactly_as_far_as_the_full_blocks_agree(a: list[int], b: list[int], size: int) -> None:
    common = 0
    while common < min(len(a), len(b)) and a[common] == b[common]:
        common += 1
    shared = common // size
    ours, theirs = chain_hashes("", a, size), chain_hashes("", b, size)
    assert ours[:shared] == theirs[:shared]
    assert not set(ours[shared:]) & set(theirs[shared:])


@given(tokens, st.text(max_size=8), st.text(max_size=8))
def test_no_hash_is_shared_between_namespaces(a: list[int], one: str, other: str) -> None:
    shared = set(chain_hashes(one, a, 2)) & set(chain_hashes(other, a, 2))
    assert bool(shared) == (one == other and len(a) >= 2)
