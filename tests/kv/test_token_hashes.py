import hypothesis.strategies as st
from hypothesis import given

from penstock.kv.cache import TokenHashes

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def hashes_of(namespace: str, token_ids: list[int], block_size: int) -> list[bytes]:
    chain = TokenHashes(namespace, block_size)
    chain.extend(token_ids)
    return chain.hashes


@given(tokens, tokens, st.integers(1, 8))
def test_hashes_agree_exactly_as_far_as_the_full_blocks_agree(a: list[int], b: list[int], size: int) -> None:
    common = 0
    while common < min(len(a), len(b)) and a[common] == b[common]:
        common += 1
    shared = common // size
    ours, theirs = hashes_of("", a, size), hashes_of("", b, size)
    assert ours[:shared] == theirs[:shared]
    assert not set(ours[shared:]) & set(theirs[shared:])


@given(tokens, st.text(max_size=8), st.text(max_size=8))
def test_no_hash_is_shared_between_namespaces(a: list[int], one: str, other: str) -> None:
    shared = set(hashes_of(one, a, 2)) & set(hashes_of(other, a, 2))
    assert bool(shared) == (one == other and len(a) >= 2)


@given(tokens, st.integers(1, 8), st.data())
def test_a_chain_that_grew_is_the_chain_of_the_whole(a: list[int], size: int, data: st.DataObject) -> None:
    chain = TokenHashes("", size)
    for end in sorted(data.draw(st.lists(st.integers(0, len(a)), max_size=4))):
        chain.extend(a[:end])
    chain.extend(a)
    assert chain.hashes == hashes_of("", a, size)
