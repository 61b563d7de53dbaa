"""A line for every step of an engine: what was in it, and how long it took. `penstock sim calibrate` reads it.

# {"kv_tokens": 16384, "max_sequences": 16, …}
prefill_tokens,prefill_pairs,decodes,decode_context,drafts,seconds
0,0,4,3211,6,0.0143211
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.core.errors import ConfigError
from penstock.sched.plan import StepPlan

_FLUSH_EVERY = 64  # lines


class StepShape(NamedTuple):
    """All that a step's time hangs on."""

    prefill_tokens: int = 0
    prefill_pairs: int = 0  # tokens of context that the prompts' tokens look at, all together
    decodes: int = 0
    decode_context: int = 0  # tokens of context that the decodes read, all together
    drafts: int = 0  # tokens that were guessed, and are computed beside those of their sequences


HEADER = ",".join((*StepShape._fields, "seconds"))


class StepLimits(msgspec.Struct, frozen=True):
    """Limits that the engine was set to: the log's first line."""

    kv_tokens: int
    block_tokens: int
    max_sequences: int
    chunk_tokens: int
    max_context_tokens: int
    overlaps: bool


def shape_of(plan: StepPlan) -> StepShape:
    tokens = pairs = decodes = context = drafts = 0
    for piece in plan.slices:
        count, start = piece.num_tokens, piece.start
        if piece.ahead:
            drafts += len(piece.ahead)
            count -= len(piece.ahead)
        if count == 1:
            decodes += 1
            context += start + 1
        else:
            tokens += count
            pairs += count * start + count * (count + 1) // 2
    return StepShape(tokens, pairs, decodes, context, drafts)


class StepLog:
    """Lines reach the file now and then, and at the end."""

    def __init__(self, path: Path, limits: StepLimits) -> None:
        try:
            self._file = path.open("w")
        except OSError as error:
            raise ConfigError(f"cannot write the step log {path}: {error.strerror}", param="step_log") from None
        self._file.write(f"# {msgspec.json.encode(limits).decode()}\n{HEADER}\n")
        self._lines = 0

    def add(self, plan: StepPlan, seconds: float) -> None:
        self._file.write(f"{','.join(map(str, shape_of(plan)))},{seconds:.7f}\n")
        self._lines += 1
        if self._lines % _FLUSH_EVERY == 0:
            self._file.flush()

    def close(self) -> None:
        self._file.close()
