"""Your own requests: a file of JSON lines, one conversation each. docs/bench.md tells its fields."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from penstock.core.errors import ConfigError
from penstock.workload.conversations import Conversation, Message, Turn
from penstock.workload.lengths import Lengths
from penstock.workload.words import Scale, text


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    """One turn; a line with a single turn is one itself."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_tokens: int | None = None  # made up: random words
    output_tokens: int | None = None
    think_s: float = 0.0
    body: dict[str, Any] = {}


class _Line(_Asked, forbid_unknown_fields=True):
    turns: list[_Asked] | None = None
    at_s: float | None = None
    session: str | None = None


_line_decoder = msgspec.json.Decoder(_Line)


class Own:
    """The n-th line; after the last comes the first again."""

    def __init__(
        self, lines: Sequence[_Line], words: Sequence[str], scale: Scale, seed: str, output: Lengths, speed: float
    ) -> None:
        self._lines = lines
        self._words = words
        self._scale = scale
        self._seed = seed
        self._output = output
        self._speed = speed

    @property
    def count(self) -> int | None:
        return len(self._lines) if _all_timed(self._lines) else None

    @property
    def num_lines(self) -> int:
        return len(self._lines)

    def at_s(self, number: int) -> float | None:
        at_s = self._lines[number].at_s if self.count is not None else None
        return None if at_s is None else at_s / self._speed

    def conversation(self, number: int) -> Conversation:
        line = self._lines[number % len(self._lines)]
        source = Random(f"{self._seed} {number}")
        turns = tuple(self._turn(asked, source) for asked in line.turns or [line])
        return Conversation(turns, line.session)

    def _turn(self, asked: _Asked, source: Random) -> Turn:
        output = asked.output_tokens or self._output.draw(source)
        return Turn(tuple(self._messages(asked, source)), output, asked.think_s, asked.body)

    def _messages(self, asked: _Asked, source: Random) -> list[Message]:
        if asked.messages is not None:
            return asked.messages
        if asked.prompt is not None:
            return [{"role": "user", "content": asked.prompt}]
        assert asked.prompt_tokens is not None
        return [{"role": "user", "content": text(self._words, self._scale.words(asked.prompt_tokens), source)}]


def read_own(path: Path, first: int = 0, count: int | None = None) -> list[_Line]:
    """Raises ConfigError that names the line."""
    found: list[_Line] = []
    try:
        rows = [(number, row) for number, row in enumerate(path.read_bytes().splitlines(), 1) if row.strip()]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    for number, row in rows[first : None if count is None else first + count]:
        try:
            line = _line_decoder.decode(row)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        _check(line, f"{path}, line {number}")
        found.append(line)
    if not found:
        raise ConfigError(f"{path} holds no requests from number {first} on")
    return sorted(found, key=lambda line: line.at_s or 0.0) if _all_timed(found) else found


def _all_timed(lines: Sequence[_Line]) -> bool:
    return all(line.at_s is not None for line in lines)


def _check(line: _Line, where: str) -> None:
    own = [line] if line.turns is None else line.turns
    if line.turns is not None and any((line.prompt, line.messages, line.prompt_tokens)):
        raise ConfigError(f"{where}: it has turns and a prompt beside them; put the prompt into the first turn")
    if not own:
        raise ConfigError(f"{where}: it has no turns")
    for asked in own:
        given = [asked.prompt is not None, bool(asked.messages), asked.prompt_tokens is not None]
        if sum(given) != 1:
            raise ConfigError(f"{where}: each turn has one of prompt, messages and prompt_tokens")
        numbers = (asked.prompt_tokens, asked.output_tokens)
        if any(number is not None and number < 1 for number in numbers) or asked.think_s < 0:
            raise ConfigError(f"{where}: lengths are at least 1, and nobody thinks for less than no time")
