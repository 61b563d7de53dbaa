"""Prompts of named blocks, as a scheduler and a KV cache read token lists and their hashes. Nothing is kept per token.

A name stands for 512 tokens and for all that comes before them, as in Mooncake's traces: equal names, equal beginnings.
What has no name, and what is generated, is the request's own and equal to nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import length_hint
from typing import cast

from penstock.core.hashing import ROUTING_TOKENS, BlockHash
from penstock.core.request import KvSource, Priority, Request
from penstock.kv.cache import TokenHashes
from penstock.sched import sequence
from penstock.workload.trace import BLOCK_TOKENS

_OWN = 1 << 62
_OWN_BITS = 24  # positions in a request
_ROOT: BlockHash = b""


class TokenRun:
    """A growing list of tokens, to whoever takes its length, a piece of it that lies in one block, or its beginning
    (`run[:count]`), which is a run again."""

    __slots__ = ("_block_tokens", "_length", "_names", "_own", "prompt_len")

    def __init__(self, number: int, prompt_len: int, names: Sequence[int], block_tokens: int) -> None:
        self.prompt_len = prompt_len
        self._names = names
        self._own = _OWN | number << _OWN_BITS
        self._block_tokens = block_tokens
        self._length = prompt_len

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, piece: slice) -> range | TokenRun:
        if piece.start is None:
            return self._beginning(piece.stop)
        start, stop, _ = piece.indices(self._length)
        first = self.value(start, (start // self._block_tokens + 1) * self._block_tokens)
        return range(first, first + stop - start)

    def _beginning(self, count: int) -> TokenRun:
        run = TokenRun(0, min(count, self.prompt_len), self._names, self._block_tokens)
        run._own, run._length = self._own, count
        return run

    def value(self, position: int, block_end: int) -> int:
        """The token there; `block_end`: of its block, which is the request's own unless the prompt fills it."""
        if block_end <= self.prompt_len:
            index, offset = divmod(position, BLOCK_TOKENS)
            if index < len(self._names):
                return self._names[index] * BLOCK_TOKENS + offset
        return self._own + position

    def append(self, token_id: int) -> None:
        self._length += 1

    def extend(self, token_ids: Iterable[int]) -> None:
        self._length += length_hint(token_ids)

    def routing_hashes(self) -> list[int]:
        size = ROUTING_TOKENS
        return [self.value(start, start + size) for start in range(0, self.prompt_len - size + 1, size)]


class RunHashes(TokenHashes):
    """A block's hash is its first token, which nobody else has."""

    def __init__(self, run: TokenRun, block_size: int) -> None:
        self._run = run
        self._block_size = block_size
        self.hashes = []
        self.extend(cast(Sequence[int], run))

    def extend(self, token_ids: Sequence[int]) -> None:
        size, value, hashes = self._block_size, self._run.value, self.hashes
        for start in range(len(hashes) * size, len(token_ids) - size + 1, size):
            hashes.append(value(start, start + size).to_bytes(8, "little"))

    def parent(self, index: int) -> BlockHash:
        return self.hashes[index - 1] if index else _ROOT

    def routing_hash(self, index: int, token_ids: Sequence[int], size: int) -> int:
        return self._run.value(index * size, (index + 1) * size)


class SimSequence(sequence.Sequence):
    """Its request's prompt is a `TokenRun`, which becomes its tokens and grows with them."""

    def _known_tokens(self) -> list[int]:
        self._run.extend(self.request.output_ids)
        return self.request.prompt_ids

    def _hash(self, block_size: int) -> TokenHashes:
        return RunHashes(self._run, block_size)

    @property
    def _run(self) -> TokenRun:
        return cast(TokenRun, self.request.prompt_ids)


def as_request(
    request_id: str,
    run: TokenRun,
    output_tokens: int,
    priority: Priority,
    generated: int = 0,
    tenant: str = "",
    kv_source: KvSource | None = None,
) -> Request:
    """Returns a request for a scheduler that makes `SimSequence`s. A run stands where others have a list."""
    return Request(
        request_id,
        cast(list[int], run),
        output_tokens,
        priority=priority,
        output_ids=[0] * generated,
        tenant=tenant,
        kv_source=kv_source,
    )
