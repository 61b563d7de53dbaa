"""KV events of other engines, read tolerantly: vLLM's two encodings, SGLang's, TensorRT-LLM's.

An event is a map with a `type` or an array that begins with it; a hash is a number or bytes, and no more than a name.
Fields that nobody knows, and kinds of event that nobody knows, are passed over. Whether a batch is the next one,
`kv_stream` knows.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from penstock.core.errors import InvalidValue

Name = int | bytes | str  # of a block, as its engine calls it
DEVICE = "GPU"  # the medium that is a device's own memory; CPU, CPU_PINNED and others are not

# Positions of the fields in arrays, after the tag. Fields are only ever appended.
_STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
)
_REMOVED = ("block_hashes", "medium", "group_idx")
# Blocks of other kinds (sliding windows, states) hold no whole prefix.
_WHOLE_PREFIX = ("full_attention", "mla_attention", "sink_full_attention")


class Stored(NamedTuple):
    """Blocks that were stored. No tokens: blocks that were told of before are somewhere else too."""

    names: Sequence[Name]
    parent: Name | None
    token_ids: array[int]
    block_size: int
    medium: str = DEVICE
    adapter: str = ""
    salt: str = ""
    media: str = ""  # what stands for images and the like in the first of the blocks
    group: int = 0


class Removed(NamedTuple):
    names: Sequence[Name]
    medium: str = DEVICE
    group: int = 0


class Cleared(NamedTuple):
    pass


class Ignored(NamedTuple):
    """An event of a group of layers whose blocks say nothing about prefixes."""

    group: int


Event = Stored | Removed | Cleared | Ignored


class Batch(NamedTuple):
    at: float  # by the engine's clock
    rank: int  # data-parallel
    events: list[Event]


def decode(payload: bytes) -> Batch:
    """Returns the batch in a message's last frame: [time, events, rank]; msgpack."""
    try:
        content = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidValue(f"not a batch of KV events: {error}") from None
    if isinstance(content, dict):
        content = [content.get("ts"), content.get("events"), content.get("data_parallel_rank")]
    if not isinstance(content, list) or len(content) < 2 or not isinstance(content[1], list):
        raise InvalidValue("not a batch of KV events")
    at = float(content[0]) if isinstance(content[0], int | float) else 0.0
    rank = content[2] if len(content) > 2 and isinstance(content[2], int) else 0
    return Batch(at, rank, [found for event in content[1] if (found := _event(event)) is not None])


def _event(event: object) -> Event | None:
    if isinstance(event, list) and event:
        fields = _STORED if event[0] == "BlockStored" else _REMOVED
        event = dict(zip(fields, event[1:], strict=False)) | {"type": event[0]}
    if not isinstance(event, dict):
        return None
    content: dict[str, Any] = event
    match content.get("type"):
        case "BlockStored":
            return _stored(content)
        case "BlockRemoved":
            return Removed(_names(content), _text(content.get("medium")) or DEVICE, _number(content.get("group_idx")))
        case "AllBlocksCleared":
            return Cleared()
        case _:
            return None


def _stored(content: dict[str, Any]) -> Event | None:
    group, kind = _number(content.get("group_idx")), content.get("kv_cache_spec_kind")
    if kind is not None and kind not in _WHOLE_PREFIX:
        return Ignored(group)
    tokens, size, names = _tokens(content.get("token_ids")), _number(content.get("block_size")), _names(content)
    if tokens is None or not names or (tokens and not 0 < len(names) * size <= len(tokens)):
        return None
    parent = content.get("parent_block_hash")
    adapter: Any = content.get("lora_name")
    salt, media = _text(content.get("cache_salt")), ""  # SGLang's name for it
    if isinstance(adapter, dict):  # in its older arrays the last field is a map of whatever else there is
        adapter, salt = adapter.get("lora_name"), _text(adapter.get("cache_salt"))
    if not adapter and content.get("lora_id") is not None:
        adapter = str(content["lora_id"])
    keys = content.get("extra_keys")
    if isinstance(keys, list) and keys and isinstance(keys[0], list | tuple):
        first = [key for key in keys[0] if key != adapter]
        salt = salt or next((key for key in first if isinstance(key, str)), "")
        media = "".join(repr(key) for key in first if not isinstance(key, str))
    return Stored(
        names,
        parent if isinstance(parent, Name) else None,
        tokens,
        size,
        _text(content.get("medium")) or DEVICE,
        _text(adapter),
        salt,
        media,
        group,
    )


def _tokens(tokens: object) -> array[int] | None:
    """None: they are not tokens, as with drafts that are pairs of them."""
    try:
        return array("I", tokens) if isinstance(tokens, list) else None
    except (TypeError, OverflowError):
        return None


def _names(content: dict[str, Any]) -> list[Name]:
    names = content.get("block_hashes")
    return [name for name in names if isinstance(name, Name)] if isinstance(names, list) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
