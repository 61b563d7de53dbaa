"""Harmony, the format of gpt-oss: an answer is a row of messages, each with a header and a channel.

    <|channel|>analysis<|message|>They want the weather.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>

Channel `analysis` holds thoughts, `final` the answer, and `commentary` calls of tools or words to the user before them.
A message to `functions.NAME` is a call on whichever channel; one to a tool of the model's own is a thought. The prompt
ends in the header of the first message: `<|start|>assistant`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from penstock.text.reasoning.splitter import without_beginning
from penstock.text.tools.parts import CallArguments, CallBegun, CallEnded, Part, ReasoningText, Text, add

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
RETURN, CALL, CONSTRAIN = "<|return|>", "<|call|>", "<|constrain|>"
MARKS = (START, CHANNEL, MESSAGE, END, RETURN, CALL, CONSTRAIN)
STOPS = (RETURN, CALL)  # tokens that end an answer
BEGUN = f"{START}assistant"  # what a prompt ends in
TO_FINAL = f"{BEGUN}{CHANNEL}final{MESSAGE}"  # what stands between the end of a thought and the answer
TO_COMMENTARY = f"{BEGUN}{CHANNEL}commentary"  # and before words, or a call
TO_CALL = f"{TO_COMMENTARY} to=functions."

_AFTER_BODY = (END, RETURN, CALL, START, CHANNEL)  # the last two: a model forgot to end its message
_FUNCTIONS = "functions."
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_MAX_HEADER = 512  # characters; no header has as many
_HEADER_BEGINS = (CHANNEL, MESSAGE, CONSTRAIN, START, "to=", "assistant")

Kind = Literal["thought", "text", "call"]


@dataclass(frozen=True)
class Header:
    kind: Kind
    name: str = ""  # of the function that is called

    @classmethod
    def read(cls, text: str, *, may_call: bool) -> Header:
        """The text before `<|message|>`. The recipient may stand before the channel or after it."""
        recipient, channel = _RECIPIENT.search(text), _CHANNEL.search(text)
        if recipient is not None and recipient[1] != "assistant":
            if recipient[1].startswith(_FUNCTIONS) and may_call:
                return cls("call", recipient[1].removeprefix(_FUNCTIONS))
            return cls("text" if recipient[1].startswith(_FUNCTIONS) else "thought")
        return cls("thought" if channel is not None and channel[1] == "analysis" else "text")


class HarmonySplitter:
    def __init__(self, prompt_end: str, *, may_call: bool) -> None:
        """`prompt_end` is the end of the prompt, in whose last message the answer begins. A message to a function is
        text without `may_call`: none was on offer."""
        self._may_call = may_call
        self._held = ""
        self._header: str | None = ""  # as far as it has come; None: its message has begun
        self._open = Header("text")
        self._has_body = False  # of the message that is open something was told
        self._told: set[Kind] = set()  # kinds of which a message has been told: the next begins on a line of its own
        self._num_calls = 0
        self._is_first = True
        self.is_answering = False
        begun = prompt_end.rpartition(START)[2].removeprefix("assistant")
        header, mark, _ = begun.partition(MESSAGE)
        if mark:
            self._begin(Header.read(header, may_call=may_call), [])
        elif CHANNEL in header:
            self._header = header

    @property
    def is_inside(self) -> bool:
        return self._header is None and self._open.kind == "thought"

    def push(self, text: str) -> list[Part]:
        self._held += text
        found: list[Part] = []
        while self._held and self._advance(found):
            pass
        return found

    def flush(self, *, is_cut: bool) -> list[Part]:
        """The token that ended an answer is no part of its text: a call that was not cut has ended."""
        held, self._held = self._held, ""
        found: list[Part] = []
        if self._header is None:
            self._tell(held, found)
            if not is_cut:
                self._end(found)
        elif self._is_first and not self._header and not _is_header(held):
            self._open = Header("text")
            self._tell(held, found)
        return found

    def _advance(self, found: list[Part]) -> bool:
        """Reads on as far as can be told; False: there must be more text first."""
        return self._read_header(found) if self._header is not None else self._read_body(found)

    def _read_header(self, found: list[Part]) -> bool:
        assert self._header is not None
        if self._is_first and not self._header and not _may_begin_header(self._held):
            self._begin(Header("text"), found)  # a model that was made to answer without one
            return True
        before, mark, rest = self._held.partition(MESSAGE)
        if mark:
            self._held = rest
            self._begin(Header.read(self._header + before, may_call=self._may_call), found)
            return True
        if len(self._held) > _MAX_HEADER:
            self._begin(Header("text"), found)
            return True
        return False

    def _read_body(self, found: list[Part]) -> bool:
        at, mark = min(((self._held.find(mark), mark) for mark in _AFTER_BODY if mark in self._held), default=(-1, ""))
        if at < 0:
            body, self._held = without_beginning(self._held, _AFTER_BODY)
            self._tell(body, found)
            return False
        self._tell(self._held[:at], found)
        self._end(found)
        # Text between a message's end and the next one's header is dropped with it.
        self._header, self._held = "", self._held[at if mark == CHANNEL else at + len(mark) :]
        return True

    def _begin(self, header: Header, found: list[Part]) -> None:
        self._header, self._open, self._is_first = None, header, False
        self._has_body = False
        self.is_answering = header.kind == "text"
        if header.kind == "call":
            found.append(CallBegun(self._num_calls, header.name))

    def _tell(self, body: str, found: list[Part]) -> None:
        if not body:
            return
        kind = self._open.kind
        if kind == "call":
            add(found, CallArguments(self._num_calls, body))
        else:
            if not self._has_body and kind in self._told:
                body = f"\n{body}"
            add(found, ReasoningText(body) if kind == "thought" else Text(body))
            self._told.add(kind)
        self._has_body = True

    def _end(self, found: list[Part]) -> None:
        if self._open.kind == "call":
            if not self._has_body:
                found.append(CallArguments(self._num_calls, "{}"))
            found.append(CallEnded(self._num_calls))
            self._num_calls += 1
        self._open = Header("text")
        self.is_answering = False


def _is_header(text: str) -> bool:
    return any(mark in text for mark in MARKS)


def _may_begin_header(text: str) -> bool:
    begun = text.lstrip()
    return any(begun.startswith(one) or one.startswith(begun) for one in _HEADER_BEGINS)
