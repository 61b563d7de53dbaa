"""The answer in a recording: the events of a streamed answer, when its texts came, and how many tokens it has. Pure.

It understands the streams of /v1/chat/completions and /v1/completions, as many servers speak them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from penstock.bench.client import Recording, RequestFailed

SLICE = 200  # events that are read without a break


@dataclass(frozen=True)
class Answer:
    """Times are those of the reads that completed the first and the last text."""

    first_s: float
    last_s: float
    gaps: array[float]  # between two reads that brought text
    text: str
    num_pieces: int  # events with text
    prompt_tokens: int | None  # as the server counts; None: it does not say
    cached_tokens: int
    output_tokens: int | None


class _Words(msgspec.Struct):
    """A delta, or a message's part; reasoning is output too."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Words | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_decoder = msgspec.json.Decoder(_Event)


class Reader:
    """Reads one recording, as much at a time as asked: a long answer must not hold up the clock of the others."""

    def __init__(self, recording: Recording) -> None:
        self._events = _events(recording)
        self._times: list[float] = []  # one for each read that brought text
        self._pieces: list[str] = []
        self._answer_pieces: list[str] = []  # without the reasoning, which no later turn repeats
        self._usage: _Usage | None = None
        self._finished_s: float | None = None

    def read(self, num_events: int = SLICE) -> bool:
        """Whether there is more. Raises RequestFailed for an error in the stream, or what is no stream."""
        for _ in range(num_events):
            found = next(self._events, None)
            if found is None:
                return False
            self._take(*found)
        return True

    def answer(self) -> Answer:
        usage, times = self._usage, self._times
        if self._finished_s is None:
            kind = "cut_off" if times else "no_text"
            raise RequestFailed(kind, "the stream ended without its last event" if times else "the stream held no text")
        if not times:
            if usage is None or not usage.completion_tokens:
                raise RequestFailed("no_text", "the stream held no text")
            times = [self._finished_s]  # tokens without a text: a part of a character, say
        details = usage.prompt_tokens_details if usage else None
        return Answer(
            first_s=times[0],
            last_s=times[-1],
            gaps=array("d", [after - before for before, after in pairwise(times)]),
            text="".join(self._answer_pieces),
            num_pieces=len(self._pieces),
            prompt_tokens=usage.prompt_tokens if usage else None,
            cached_tokens=(details.cached_tokens or 0) if details else 0,
            output_tokens=usage.completion_tokens if usage else None,
        )

    def _take(self, arrived_s: float, data: bytes) -> None:
        if data == b"[DONE]":
            self._finished_s = arrived_s if self._finished_s is None else self._finished_s
            return
        try:
            event = _decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise RequestFailed("malformed", f"{error}: {data[:300]!r}") from None
        if event.error and event.error != b"null":
            raise RequestFailed("stream_error", bytes(event.error).decode(errors="replace")[:300])
        self._usage = event.usage or self._usage
        if event.usage is not None and not event.choices and self._finished_s is None:
            self._finished_s = arrived_s  # by itself it is the last event
        for choice in event.choices:
            self._take_choice(arrived_s, choice)

    def _take_choice(self, arrived_s: float, choice: _Choice) -> None:
        if choice.finish_reason is not None and self._finished_s is None:
            self._finished_s = arrived_s
        words = choice.delta
        answer = choice.text or (words.content if words else None)
        piece = answer or ((words.reasoning_content or words.reasoning) if words else None)
        if piece:
            self._pieces.append(piece)
            if answer:
                self._answer_pieces.append(answer)
            if not self._times or self._times[-1] != arrived_s:
                self._times.append(arrived_s)


def digest(recording: Recording) -> Answer:
    """All of it at once."""
    reader = Reader(recording)
    while reader.read():
        pass
    return reader.answer()


def _events(recording: Recording) -> Iterator[tuple[float, bytes]]:
    """The data of each event at the time of the read that completed it. OpenAI's events are one `data:` line each."""
    rest = b""
    for arrived_s, part in zip(recording.times, recording.parts, strict=True):
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield arrived_s, line[5:].strip()
