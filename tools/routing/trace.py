"""Requests of a Mooncake trace: when, how long, and which blocks of 512 tokens the prompt is made of."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

BLOCK_TOKENS = 512


class Row(NamedTuple):
    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    session: str  # of the request whose prompt this one goes on from, as a client would name its conversation


def read(path: Path, first: int = 0, count: int | None = None) -> list[Row]:
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as lines:
        rows = [json.loads(line) for line in lines]
    last = len(rows) if count is None else first + count
    return list(_with_sessions(rows[first:last]))


def _with_sessions(rows: Sequence[dict[str, object]]) -> Iterable[Row]:
    common = _common_beginning([tuple(row["hash_ids"]) for row in rows])  # type: ignore[arg-type]
    sessions: dict[int, str] = {}  # by block beyond what everybody's prompt begins with
    began = rows[0]["timestamp"]
    for number, row in enumerate(rows):
        blocks: tuple[int, ...] = tuple(row["hash_ids"])  # type: ignore[arg-type]
        own = blocks[common:]
        session = next((sessions[block] for block in own[:1] if block in sessions), f"s{number}")
        for block in own:
            sessions.setdefault(block, session)
        tokens = int(row["input_length"]), max(1, int(row["output_length"]))  # type: ignore[call-overload]
        yield Row((row["timestamp"] - began) / 1000, *tokens, blocks, session)  # type: ignore[operator]


def _common_beginning(prompts: Sequence[tuple[int, ...]]) -> int:
    """How many first blocks more than a tenth of the prompts share."""
    depth = 0
    while True:
        heads = [prompt[: depth + 1] for prompt in prompts if len(prompt) > depth]
        if not heads or max(heads.count(head) for head in set(heads[:20])) < len(prompts) / 10:
            return depth
        depth += 1
