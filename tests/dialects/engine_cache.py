"""An engine's prefix cache, small: it stores the blocks of prompts, evicts leaves, and tells both as events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.core.hashing import routing_hashes

Encoder = Callable[[str, dict[str, Any]], Any]


def as_map(kind: str, fields: dict[str, Any]) -> Any:
    return {"type": kind, **fields}


def as_array(kind: str, fields: dict[str, Any]) -> Any:
    return [kind, *fields.values()]


class EngineCache:
    def __init__(self, block_size: int, encode: Encoder = as_map, *, has_bytes: bool = False, salt: str = "") -> None:
        self.block_size = block_size
        self._encode = encode
        self._has_bytes = has_bytes
        self._salt = salt
        self.blocks: dict[tuple[int, ...], Any] = {}  # by the whole prefix: the name

    def prefill(self, tokens: list[int]) -> list[Any]:
        """The events of the blocks that were not there."""
        size, new = self.block_size, []
        for end in range(size, len(tokens) + 1, size):
            prefix = tuple(tokens[:end])
            if prefix not in self.blocks:
                new.append(prefix)
                self.blocks[prefix] = self._name(prefix)
        if not new:
            return []
        parent = new[0][:-size]
        fields = {
            "block_hashes": [self.blocks[prefix] for prefix in new],
            "parent_block_hash": self.blocks[parent] if parent else None,
            "token_ids": [token for prefix in new for token in prefix[-size:]],
            "block_size": size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [[self._salt] if self._salt and len(prefix) == size else None for prefix in new],
        }
        return [self._encode("BlockStored", fields)]

    def evict_leaf(self, which: int) -> list[Any]:
        leaves = [p for p in self.blocks if not any(len(q) > len(p) and q[: len(p)] == p for q in self.blocks)]
        if not leaves:
            return []
        name = self.blocks.pop(leaves[which % len(leaves)])
        return [self._encode("BlockRemoved", {"block_hashes": [name], "medium": "GPU"})]

    def clear(self) -> list[Any]:
        self.blocks.clear()
        return [self._encode("AllBlocksCleared", {})]

    def routing(self, size: int) -> set[int]:
        """Returns what a router should know of it."""
        return {name for prefix in self.blocks for name in routing_hashes(self._salt, prefix, size)}

    def _name(self, prefix: tuple[int, ...]) -> Any:
        number = hash((prefix, self._salt))
        return number.to_bytes(8, "big", signed=True) * 4 if self._has_bytes else number
