"""Snapshots of a server from what it answers: documents become numbers by name, and those a `ReplicaSnapshot`.

A number that is not there stays unknown. A document without the numbers that say how busy a server is is no reading at
all: nothing is heard, the last snapshot grows old, and an old snapshot is never taken for an idle replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.core.measurements import EngineLoad, ServingLimits
from penstock.core.replica import UNBOUNDED, ReplicaSnapshot, ReplicaState
from penstock.dialects import exposition
from penstock.dialects.dialect import Dialect, Document, Member, Signal

Values = Mapping[Signal, float]

_LOAD = (Signal.WAITING, Signal.RUNNING)
_TOTALS = (
    Signal.STEPS,
    Signal.PROMPT_TOKENS,
    Signal.PROMPTS,
    Signal.PREFILL_TOKENS,
    Signal.PREFILL_SECONDS,
    Signal.DECODE_TOKENS,
    Signal.DECODE_SECONDS,
)
_PROMPT_TOKENS = 512.0  # of a prompt, of a server that has seen none
_PREFILL_RATE = _DECODE_RATE = 2000.0  # tokens per second, of one that has measured nothing
_STEP_TOKENS = 2048
_MAX_VALUE = 2.0**53  # what is more, or no number, says nothing
_MIN_TOKENS = 16.0  # below it, two readings say nothing about speed


class _Card(msgspec.Struct):
    id: str = ""
    parent: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card] = []


_cards_decoder = msgspec.json.Decoder(_Cards)


def adapters(body: bytes) -> frozenset[str]:
    """Returns the adapters in an answer to /v1/models: the cards that name another as the one they are based on."""
    try:
        cards = _cards_decoder.decode(body).data
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return frozenset()
    return frozenset(card.id for card in cards if card.parent and card.id)


def read(document: Document, body: bytes) -> dict[Signal, float]:
    """Returns what is in the answer of all that the table names."""
    if document.series:
        found = exposition.read(body, document.series)
    else:
        try:
            content = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return {}
        found = {signal: _member(content, member) for signal, member in document.members.items()}
    return {signal: value for signal, value in found.items() if value is not None and 0 <= value <= _MAX_VALUE}


def missing(document: Document, values: Values) -> list[Signal]:
    """Returns which of the numbers that say how busy it is should be there, and are not."""
    return [signal for signal in _LOAD if signal in document.signals and signal not in values]


def snapshot(
    dialect: Dialect, values: Values, before: Values, *, id: str, url: str, model: str, taken_at: float | None
) -> ReplicaSnapshot:
    """`before`: an older reading of the same server, so that its speed is that of lately; empty: there is none.

    `taken_at` is None for a server that does not say how busy it is: then it is as large as it likes.
    """
    reports = taken_at is not None
    running = int(values.get(Signal.RUNNING, 0))
    waiting = int(values.get(Signal.WAITING, 0))
    capacity = _capacity(values)
    return ReplicaSnapshot(
        id=id,
        url=url,
        models=(model,),
        taken_at=taken_at or 0.0,
        reports=reports,
        limits=ServingLimits(
            max_num_seqs=(int(values.get(Signal.MAX_RUNNING, 0)) or dialect.max_sequences) if reports else UNBOUNDED,
            chunk_tokens=(int(values.get(Signal.STEP_TOKENS, 0)) or _STEP_TOKENS) if reports else UNBOUNDED,
            max_model_len=int(values.get(Signal.MAX_CONTEXT, 0)) or UNBOUNDED,
            kv_capacity_tokens=capacity,
        ),
        load=EngineLoad(
            num_waiting=waiting,
            num_running=running,
            queued_tokens=int(values.get(Signal.WAITING_TOKENS, waiting * _mean_prompt(values, before))),
            kv_active_tokens=_kv_active(values, capacity),
            steps=int(values.get(Signal.STEPS, 0)),
        ),
        prefill_tokens_per_s=prefill_rate(values, before) or _PREFILL_RATE,
        decode_tokens_per_s=_decode_rate(values, before, running) or _DECODE_RATE,
        state=ReplicaState.OUT if values.get(Signal.IS_AWAKE) == 0 else ReplicaState.READY,
    )


class Progress:
    """Counts a server's steps; where it does not do so itself, every reading in which its work has moved is one."""

    _MOVES = (Signal.RUNNING, Signal.KV_USED_TOKENS, Signal.KV_USAGE, Signal.DECODE_TOKENS, Signal.PROMPT_TOKENS)

    def __init__(self) -> None:
        self._last: tuple[float | None, ...] = ()
        self._moves = 0

    def steps(self, values: Values) -> int:
        if Signal.STEPS in values:
            return int(values[Signal.STEPS])
        state = tuple(values.get(signal) for signal in self._MOVES)
        if state != self._last:
            self._last, self._moves = state, self._moves + 1
        return self._moves


class Lately:
    """Keeps a few readings of one server, so that its speed can be that of the last minute."""

    def __init__(self, over_s: float = 60.0) -> None:
        self._over_s = over_s
        self._kept: list[tuple[float, Values]] = []

    def before(self, values: Values, now: float) -> Values:
        """A reading of about `over_s` ago, or the oldest since the server's start; empty: this is the first."""
        kept = self._kept
        if kept and any(values.get(signal, 0.0) < kept[-1][1].get(signal, 0.0) for signal in _TOTALS):
            kept.clear()  # it counts from nothing again
        if not kept or now - kept[-1][0] >= self._over_s / 4:
            kept.append((now, values))
        while len(kept) > 1 and now - kept[1][0] >= self._over_s:
            kept.pop(0)
        return kept[0][1] if now > kept[0][0] else {}


def prefill_rate(values: Values, before: Values) -> float | None:
    return _ratio(values, before, Signal.PREFILL_TOKENS, Signal.PREFILL_SECONDS)


def _decode_rate(values: Values, before: Values, running: int) -> float | None:
    """Returns the rate of the whole batch: as it says, or as fast as one sequence, times as many as run."""
    if rate := values.get(Signal.DECODE_RATE):
        return rate
    one = _ratio(values, before, Signal.DECODE_TOKENS, Signal.DECODE_SECONDS)
    return one * max(1, running) if one else None


def _mean_prompt(values: Values, before: Values) -> float:
    return _ratio(values, before, Signal.PROMPT_TOKENS, Signal.PROMPTS) or _PROMPT_TOKENS


def _ratio(values: Values, before: Values, amount: Signal, per: Signal) -> float | None:
    """Returns the ratio of two totals: since `before`, or since the server's start where too little happened since."""
    if amount not in values or per not in values:
        return None
    amounts, pers = values[amount], values[per]
    since, over = amounts - before.get(amount, 0.0), pers - before.get(per, 0.0)
    if since >= _MIN_TOKENS and over > 0:
        return since / over
    return amounts / pers if amounts >= _MIN_TOKENS and pers > 0 else None


def _capacity(values: Values) -> int:
    if tokens := values.get(Signal.KV_TOKENS):
        return int(tokens)
    blocks, size = values.get(Signal.KV_BLOCKS), values.get(Signal.BLOCK_SIZE)
    return int(blocks * size) if blocks and size else UNBOUNDED


def _kv_active(values: Values, capacity: int) -> int:
    if Signal.KV_USED_TOKENS in values:
        return int(values[Signal.KV_USED_TOKENS])
    if capacity >= UNBOUNDED:
        return 0
    return int(values.get(Signal.KV_USAGE, 0.0) * capacity)


def _member(content: Any, member: Member) -> float | None:
    found = [content]
    for key in member.path:
        if key == "*":
            found = [each for value in found if isinstance(value, list) for each in value]
        else:
            found = [value[key] for value in found if isinstance(value, dict) and key in value]
    return exposition.joined([float(value) for value in found if isinstance(value, int | float)], member.join)
