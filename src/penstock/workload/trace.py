"""The requests of a trace: when they came, how long they were, and what their prompts had in common.

Mooncake's traces (JSON lines) name each prompt's blocks of 512 tokens, equal names for equal beginnings; Azure's (CSV)
say lengths only, so that no two of their prompts have anything in common.
"""

from __future__ import annotations

import csv
import lzma
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from penstock.core.errors import ConfigError

BLOCK_TOKENS = 512  # of a named block


class Arrival(NamedTuple):
    """One request. `blocks` cover the whole prompt, the last one perhaps in part; empty: it shares nothing."""

    at_s: float  # since the first one of the trace
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    session: str = ""  # as a client would name its conversation, inferred from the blocks

    @property
    def whole_blocks(self) -> tuple[int, ...]:
        return self.blocks[: self.prompt_tokens // BLOCK_TOKENS]


class _MooncakeRow(msgspec.Struct):
    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


_mooncake_decoder = msgspec.json.Decoder(_MooncakeRow)


def read_trace(path: Path, first: int = 0, count: int | None = None) -> list[Arrival]:
    """Those from `first` on, in the order they came; the first of them comes at 0 s. `.xz` is read too."""
    try:
        with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as lines:
            is_csv = ".csv" in path.suffixes
            rows = islice((_azure if is_csv else _mooncake)(lines), first, None if count is None else first + count)
            arrivals = list(rows)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.MsgspecError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} is no trace of Mooncake's or Azure's form: {error}") from None
    if not arrivals:
        raise ConfigError(f"{path} holds no requests from number {first} on")
    arrivals.sort(key=lambda one: one.at_s)
    began = arrivals[0].at_s
    return _with_sessions([one._replace(at_s=one.at_s - began) for one in arrivals])


def _mooncake(lines: IO[str]) -> Iterator[Arrival]:
    for row in map(_mooncake_decoder.decode, filter(str.strip, lines)):
        yield Arrival(row.timestamp / 1000, row.input_length, max(1, row.output_length), row.hash_ids)


def _azure(lines: IO[str]) -> Iterator[Arrival]:
    for row in csv.DictReader(lines):
        at_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()  # its seventh digit is beyond a microsecond
        yield Arrival(at_s, int(row["ContextTokens"]), max(1, int(row["GeneratedTokens"])))


def _with_sessions(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """A request goes on with the conversation whose first own block it begins with."""
    common = _common_beginning([one.blocks for one in arrivals])
    sessions: dict[int, str] = {}  # by first block beyond what everybody's prompt begins with
    named = []
    for number, one in enumerate(arrivals):
        own = one.blocks[common:]
        session = sessions.setdefault(own[0], f"s{number}") if own else f"s{number}"
        named.append(one._replace(session=session))
    return named


def _common_beginning(prompts: Sequence[tuple[int, ...]]) -> int:
    """Returns how many first blocks more than a tenth of the prompts share."""
    depth = 0
    while True:
        heads = Counter(prompt[depth] for prompt in prompts if len(prompt) > depth)
        if not heads or max(heads.values()) < len(prompts) / 10:
            return depth
        depth += 1
