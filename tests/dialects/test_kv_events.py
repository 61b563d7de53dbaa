from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidValue
from penstock.core.hashing import routing_hashes
from penstock.dialects.kv_blocks import Changes, EngineBlocks
from penstock.dialects.kv_events import Cleared, Ignored, Removed, Stored, decode
from tests.dialects.engine_cache import EngineCache, as_array, as_map

STORED = {
    "block_hashes": [11, 12],
    "parent_block_hash": 10,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "CPU",
    "lora_name": "sql",
}


def only(*events: Any, rank: Any = 3) -> Any:
    batch = decode(msgspec.msgpack.encode([1.5, list(events), rank]))
    assert (batch.at, batch.rank) == (1.5, rank or 0)
    assert len(batch.events) == 1
    return batch.events[0]


def test_maps_and_arrays_say_the_same() -> None:
    of_map, of_array = only(as_map("BlockStored", STORED)), only(as_array("BlockStored", STORED))
    assert of_map == of_array
    assert (of_map.names, of_map.parent, list(of_map.token_ids)) == ([11, 12], 10, [1, 2, 3, 4])
    assert (of_map.medium, of_map.adapter) == ("CPU", "sql")
    assert only(["BlockRemoved", [11], "GPU"]) == only(as_map("BlockRemoved", {"block_hashes": [11]})) == Removed([11])
    assert only(["AllBlocksCleared"]) == only({"type": "AllBlocksCleared"}) == Cleared()


def test_sglangs_arrays_end_with_a_map_of_whatever_else_there_is() -> None:
    event = only(
        ["BlockStored", [-5], None, [1, 2], 2, None, "CPU_PINNED", {"cache_salt": "acme", "new": [1]}], rank=None
    )
    assert event.salt == "acme"
    assert (event.names, event.parent, event.medium) == ([-5], None, "CPU_PINNED")
    short = only(["BlockStored", [7], None, [1, 2], 2, 5])
    assert (short.adapter, short.medium) == ("5", "GPU")


def test_sglangs_maps_name_the_salt() -> None:
    event = only(as_map("BlockStored", STORED | {"cache_salt": "acme", "session_id": "s", "lora_name": None}))
    assert (event.salt, event.adapter) == ("acme", "")


def test_names_may_be_numbers_of_any_sign_and_size_or_bytes() -> None:
    for name in (0, -(2**63), 2**64 - 1, b"\x00" * 32):
        assert only(as_map("BlockRemoved", {"block_hashes": [name]})).names == [name]


def test_fields_and_kinds_that_nobody_knows_are_passed_over() -> None:
    unknown = [["LoadStat", 1, 2, 3, 4, 0, 5], {"type": "BlockMoved"}, 5, None, [], {}, "x", [None], [[1]]]
    event = only(*unknown, as_map("BlockStored", STORED | {"session_id": "s", "ownership": None, "later": {"a": []}}))
    assert isinstance(event, Stored)


def test_what_vllm_mixes_into_a_hash_is_told_apart() -> None:
    event = only(as_map("BlockStored", STORED | {"extra_keys": [["sql", ["img", 3], "acme"], None]}))
    assert (event.adapter, event.salt) == ("sql", "acme")
    assert "img" in event.media


def test_groups_of_layers_without_whole_prefixes_are_named_once_and_ignored() -> None:
    assert only(as_map("BlockStored", STORED | {"kv_cache_spec_kind": "sliding_window", "group_idx": 1})) == Ignored(1)
    kept = only(as_map("BlockStored", STORED | {"kv_cache_spec_kind": "full_attention", "group_idx": 0}))
    assert isinstance(kept, Stored)


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [1]},
        {"token_ids": [[1, 2], [2, 3], [3, 4], [4, 5]]},
        {"token_ids": [-1, 2, 3, 4]},
        {"block_size": 0},
        {"block_hashes": None},
        {"block_hashes": []},
        {"token_ids": "abcd"},
    ],
)
def test_an_event_that_makes_no_sense_is_none(change: dict[str, Any]) -> None:
    assert decode(msgspec.msgpack.encode([0, [as_map("BlockStored", STORED | change)]])).events == []


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x90", b"\x01", msgspec.msgpack.encode([1.0]), b"\x92\x01\x02"])
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(InvalidValue):
        decode(payload)


@given(st.binary(max_size=60))
def test_no_bytes_do_harm(payload: bytes) -> None:
    with contextlib.suppress(InvalidValue):
        EngineBlocks().apply(decode(payload), Changes())


# -- the engine's blocks as routing blocks

SIZE = 8
prompts = st.lists(st.integers(0, 2), max_size=40)
doings = st.lists(st.one_of(prompts, st.integers(0, 20)), max_size=25)


class Listener:
    """A router that hears what an engine's cache does."""

    def __init__(self, cache: EngineCache) -> None:
        self.cache = cache
        self.blocks = EngineBlocks(size=SIZE)
        self.known: set[int] = set()
        self.on_host: set[int] = set()

    def hear(self, events: list[Any]) -> None:
        changes = Changes()
        self.blocks.apply(decode(msgspec.msgpack.encode([0.0, events])), changes)
        if changes.is_cleared:
            self.known.clear()
            self.on_host.clear()
        assert set(changes.removed) <= self.known
        self.known -= set(changes.removed)
        self.known |= set(changes.stored) | set(changes.on_host)
        self.on_host = (self.on_host | set(changes.on_host)) & self.known - set(changes.stored)


@given(doings, st.sampled_from([1, 2, 3, 4, 8, 12, 16]), st.booleans(), st.sampled_from([as_map, as_array]))
def test_a_router_that_heard_everything_knows_exactly_what_is_cached(
    doings: list[list[int] | int], block_size: int, has_bytes: bool, encode: Any
) -> None:
    heard = Listener(EngineCache(block_size, encode, has_bytes=has_bytes, salt="acme"))
    for doing in doings:
        cache = heard.cache
        heard.hear(cache.evict_leaf(doing) if isinstance(doing, int) else cache.prefill(doing))
        assert heard.known == cache.routing(SIZE) == set(heard.blocks.hashes())
        assert not heard.blocks.is_approximate
    heard.hear(heard.cache.clear())
    assert heard.known == set()
    assert heard.blocks.num_blocks == 0


def test_blocks_whose_beginning_nobody_heard_of_make_the_index_approximate() -> None:
    late = Listener(EngineCache(4))
    late.cache.prefill(list(range(16)))  # before anybody listened
    late.hear(late.cache.prefill(list(range(32))))
    assert late.known == set()
    assert late.blocks.is_approximate
    late.hear(late.cache.prefill([7] * 16))
    assert late.known == set(routing_hashes("", [7] * 16, SIZE))
    late.hear(late.cache.clear())
    assert not late.blocks.is_approximate  # an empty cache is known exactly


def test_a_block_is_there_while_any_tier_has_it() -> None:
    heard = Listener(EngineCache(8))
    event = heard.cache.prefill(list(range(8)))[0]
    heard.hear([event, event | {"medium": "CPU"}])
    name = event["block_hashes"]
    heard.hear([as_map("BlockRemoved", {"block_hashes": name, "medium": "GPU"})])
    assert len(heard.known) == 1
    heard.hear([as_map("BlockRemoved", {"block_hashes": name, "medium": "CPU"})])
    assert heard.known == set()


@pytest.mark.parametrize("medium", ["CPU", "CPU_PINNED"])
def test_blocks_that_only_host_memory_has_are_told_apart(medium: str) -> None:
    """As vLLM offloads: blocks on the device are copied, and of the copies only the names are told."""
    heard = Listener(EngineCache(4))
    (event,) = heard.cache.prefill(list(range(16)))
    heard.hear([event])
    first, second = routing_hashes("", list(range(16)), SIZE)
    names = event["block_hashes"]
    copied = event | {"parent_block_hash": None, "token_ids": [], "block_size": 0, "medium": medium}
    heard.hear([copied, copied | {"block_hashes": ["nobody told of this one"]}])
    assert heard.on_host == set()
    heard.hear([as_map("BlockRemoved", {"block_hashes": [names[3]], "medium": "GPU"})])  # half a routing block
    assert (heard.known, heard.on_host) == ({first, second}, {second})
    heard.hear([as_map("BlockRemoved", {"block_hashes": names[:3], "medium": "GPU"})])
    assert heard.on_host == {first, second}
    heard.hear([event | {"block_hashes": names[:2], "token_ids": list(range(8))}])  # fetched
    assert (heard.known, heard.on_host) == ({first, second}, {second})
    heard.hear([as_map("BlockRemoved", {"block_hashes": names, "medium": medium})])
    assert (heard.known, heard.on_host) == ({first}, set())
    assert not heard.blocks.is_approximate


media = st.lists(st.tuples(st.sampled_from(["stored", "removed"]), st.integers(0, 3), st.sampled_from(["GPU", "CPU"])))


@given(media, st.integers(1, 5))
def test_however_blocks_move_the_router_knows_where_they_are(moves: list[tuple[str, int, str]], together: int) -> None:
    heard = Listener(EngineCache(4))
    (event,) = heard.cache.prefill(list(range(16)))
    where: list[set[str]] = [{"GPU"} for _ in range(4)]
    events = [event]
    for kind, which, medium in [*moves, ("end", 0, "")]:
        if kind == "stored" and where[which]:
            events.append(event | {"block_hashes": [event["block_hashes"][which]], "token_ids": [], "medium": medium})
            where[which].add(medium)
        elif kind == "removed" and where[which] and where[which] != {medium}:  # one that went could not come back
            events.append(as_map("BlockRemoved", {"block_hashes": [event["block_hashes"][which]], "medium": medium}))
            where[which].discard(medium)
        if len(events) >= together or kind == "end":
            heard.hear(events)
            events = []
            names = routing_hashes("", list(range(16)), SIZE)
            assert heard.known == set(names)
            off = {name for i, name in enumerate(names) if not all("GPU" in one for one in where[2 * i : 2 * i + 2])}
            assert heard.on_host == off


def test_ranks_have_caches_of_their_own() -> None:
    cache, blocks = EngineCache(8), EngineBlocks(size=SIZE)
    stored = cache.prefill(list(range(8)))
    gone = cache.evict_leaf(0)
    for rank in (0, 1):
        blocks.apply(decode(msgspec.msgpack.encode([0.0, stored, rank])), Changes())
    changes = Changes()
    blocks.apply(decode(msgspec.msgpack.encode([0.0, gone, 1])), changes)
    assert not changes
    assert len(blocks) == 1


def test_memory_is_bounded() -> None:
    cache, blocks = EngineCache(1), EngineBlocks(size=SIZE, max_blocks=20)
    blocks.apply(decode(msgspec.msgpack.encode([0.0, cache.prefill(list(range(100)))])), Changes())
    assert blocks.num_blocks == 20
    assert blocks.is_approximate
