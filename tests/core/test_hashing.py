import hypothesis.strategies as st
from hypothesis import given

from penstock.core.hashing import cache_namespace, chain_routing, routing_hashes, routing_root

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=40)
names = st.text(max_size=8)


@given(tokens, tokens, st.integers(1, 8))
def test_routing_hashes_agree_exactly_as_far_as_the_full_blocks_agree(a: list[int], b: list[int], size: int) -> None:
    common = 0
    while common < min(len(a), len(b)) and a[common] == b[common]:
        common += 1
    ours, theirs = routing_hashes("", a, size), routing_hashes("", b, size)
    assert len(ours) == len(a) // size
    assert all(0 <= name < 2**64 for name in ours)
    assert ours[: common // size] == theirs[: common // size]
    assert not set(ours[common // size :]) & set(theirs[common // size :])


@given(tokens, st.tuples(names, names, names), st.tuples(names, names, names))
def test_namespace_adapter_and_media_each_keep_hashes_apart(
    a: list[int], one: tuple[str, str, str], other: tuple[str, str, str]
) -> None:
    ours = routing_hashes(one[0], a, 4, adapter=one[1], media=one[2])
    theirs = routing_hashes(other[0], a, 4, adapter=other[1], media=other[2])
    assert bool(set(ours) & set(theirs)) == (one == other and len(a) >= 4)


@given(tokens, st.integers(1, 8), st.integers(0, 10))
def test_a_chain_can_be_taken_up_again_anywhere(a: list[int], size: int, known: int) -> None:
    whole = routing_hashes("acme", tuple(a), size)
    known = min(known, len(whole))
    parent = whole[known - 1] if known else routing_root("acme")
    assert whole[:known] + chain_routing(parent, a[known * size :], size) == whole


@given(st.tuples(names, names), st.tuples(names, names))
def test_no_salt_can_spell_another_tenants_namespace(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (cache_namespace(*one) == cache_namespace(*other)) == (one == other)


def test_hashes_are_the_same_in_every_process_and_release() -> None:
    assert routing_hashes("t", [1] * 600) == [1480436895001758, 18277027425468452333]
