from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from penstock.core.replica import ReplicaSnapshot
from penstock.router.prefix_index import UNKNOWN_CAPACITY_BLOCKS, PrefixIndex

A, B, C = (ReplicaSnapshot(id=name) for name in "abc")
CHAIN = tuple(range(100, 110))


def held(index: PrefixIndex, hashes: Any = CHAIN) -> dict[str, int]:
    return index.held(hashes, [A, B, C])


def test_a_match_is_as_long_as_the_prompt_is_held_from_its_beginning() -> None:
    index = PrefixIndex()
    index.reset("a", CHAIN)
    index.reset("b", CHAIN[:4])
    index.reset("c", CHAIN[1:])  # without the first block the rest is of no use
    assert held(index) == {"a": 10, "b": 4}
    assert held(index, CHAIN[:3]) == {"a": 3, "b": 3}
    index.removed("a", [CHAIN[2]])
    assert held(index) == {"a": 2, "b": 4}
    assert index.holders(CHAIN, 5) == ["b", "a"]
    assert index.holders(CHAIN, 1) == ["b"]


def test_an_unknown_prompt_and_an_empty_one_match_nobody() -> None:
    index = PrefixIndex()
    index.reset("a", CHAIN)
    assert held(index, (1, 2)) == held(index, ()) == {}
    assert index.holders((1, 2), 5) == []


def test_a_snapshot_replaces_what_was_known_and_a_place_is_used_again() -> None:
    index = PrefixIndex()
    index.reset("a", CHAIN)
    index.reset("a", CHAIN[:2])
    assert held(index) == {"a": 2}
    index.forget("a")
    assert held(index) == {}
    assert index.num_hashes == 0
    index.reset("b", CHAIN[:5])
    assert held(index) == {"b": 5}
    index.forget("nobody")


def test_a_prediction_counts_for_a_few_seconds_unless_an_event_confirms_it() -> None:
    index = PrefixIndex(predicted_s=5.0)
    index.reset("a", ())
    index.predicted("a", CHAIN, now=1.0)
    assert held(index) == {"a": 10}
    index.stored("a", CHAIN[:3])
    index.expire(5.9)
    assert held(index) == {"a": 10}
    index.expire(6.0)
    assert held(index) == {"a": 3}
    assert index.num_blocks("a") == 3


def test_a_prediction_is_renewed_by_the_next_sibling() -> None:
    index = PrefixIndex(predicted_s=5.0)
    index.reset("a", ())
    index.predicted("a", CHAIN, now=0.0)
    index.predicted("a", CHAIN[:4], now=3.0)
    index.expire(5.0)
    assert held(index) == {"a": 4}
    index.expire(8.0)
    assert held(index) == {}


def test_a_replica_that_says_nothing_has_what_was_sent_there_up_to_its_capacity() -> None:
    index = PrefixIndex()
    index.predicted("a", CHAIN[:4], now=0.0, capacity_blocks=6)
    index.predicted("a", (1, 2, 3, 4), now=1.0, capacity_blocks=6)
    index.expire(1000.0)
    assert held(index) == {"a": 2}  # of the older prompt the end is forgotten first
    assert held(index, (1, 2, 3, 4)) == {"a": 4}
    assert not index.is_exact("a")
    index.predicted("b", range(UNKNOWN_CAPACITY_BLOCKS + 9), now=0.0)
    assert index.num_blocks("b") == UNKNOWN_CAPACITY_BLOCKS


def test_from_its_first_event_on_a_replica_is_believed_and_no_longer_guessed() -> None:
    index = PrefixIndex()
    index.predicted("a", CHAIN, now=0.0)
    index.stored("a", CHAIN[:1])
    assert held(index) == {"a": 1}
    assert not index.is_exact("a")  # it may hold what it stored before we listened
    index.reset("a", CHAIN[:1])
    assert index.is_exact("a")
    index.lost_track("a")
    assert not index.is_exact("a")
    index.reset("a", ())
    assert index.is_exact("a")


def test_memory_is_bounded_and_who_exceeds_it_is_approximate() -> None:
    index = PrefixIndex(max_blocks=6)
    index.reset("a", CHAIN)
    assert held(index) == {"a": 6}
    assert not index.is_exact("a")
    index.predicted("a", (1, 2, 3), now=0.0)
    assert index.num_blocks("a") == 6
    index.removed("a", CHAIN[4:])
    index.stored("a", CHAIN[4:5])
    assert held(index) == {"a": 5}


def test_blocks_in_host_memory_are_held_and_told_apart() -> None:
    index = PrefixIndex()
    index.reset("a", CHAIN[:2])
    index.stored_on_host("a", CHAIN[2:6])
    index.stored_on_host("b", CHAIN)
    index.reset("c", CHAIN)
    found = held(index)
    assert found == {"a": 6, "b": 10, "c": 10}
    assert index.on_host(CHAIN, found) == {"a": 4, "b": 10}
    index.stored("a", CHAIN[2:4])  # they came back to the device
    index.stored_on_host("c", CHAIN[8:])
    index.removed("b", CHAIN[3:4])  # what is on the host after it is of no use
    found = held(index)
    assert index.on_host(CHAIN, found) == {"a": 2, "b": 3, "c": 2}
    assert index.on_host(CHAIN[:3], held(index, CHAIN[:3])) == {"b": 3}
    index.forget("a")
    index.reset("b", CHAIN)
    assert index.on_host(CHAIN, held(index)) == {"c": 2}


operations = st.lists(
    st.tuples(
        st.sampled_from(["stored", "stored_on_host", "removed", "reset", "forget", "predicted"]),
        st.sampled_from("abc"),
        st.lists(st.integers(0, 6), max_size=5, unique=True),
    ),
    max_size=30,
)


@given(operations=operations, chain=st.lists(st.integers(0, 6), max_size=6, unique=True))
def test_the_index_says_what_a_set_for_each_replica_would(
    operations: list[tuple[str, str, list[int]]], chain: list[int]
) -> None:
    index, sets = PrefixIndex(predicted_s=1.0), {name: set[int]() for name in "abc"}
    on_host = {name: set[int]() for name in "abc"}
    for name in "abc":
        index.reset(name, ())
    for now, (what, name, hashes) in enumerate(operations):
        match what:
            case "forget":
                index.forget(name)
                index.reset(name, ())
                sets[name].clear()
                on_host[name].clear()
            case "predicted":  # and never confirmed
                index.predicted(name, hashes, float(now))
            case "reset":
                index.reset(name, hashes)
                sets[name] = set(hashes)
                on_host[name].clear()
            case "stored":
                index.stored(name, hashes)
                sets[name] |= set(hashes)
                on_host[name] -= set(hashes)
            case "stored_on_host":
                index.stored_on_host(name, hashes)
                sets[name] |= set(hashes)
                on_host[name] |= set(hashes)
            case _:
                index.removed(name, hashes)
                sets[name] -= set(hashes)
                on_host[name] -= set(hashes)
        index.expire(now + 1.0)
        expected = {}
        for replica, known in sets.items():
            depth = next((i for i, block in enumerate(chain) if block not in known), len(chain))
            if depth:
                expected[replica] = depth
        asked = list(chain)
        assert held(index, asked) == expected
        there = {name: len(on_host[name].intersection(chain[:depth])) for name, depth in expected.items()}
        assert index.on_host(asked, expected) == {name: count for name, count in there.items() if count}
    assert index.num_hashes == len(set.union(*sets.values()))
