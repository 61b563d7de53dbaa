"""Parser of text as it comes into the parts of an answer, for all families: where calls begin, and where they end.

A call is opened by a mark, or, where the family has none, by a brace that begins the answer. Text that turns out to be
no call is given back as text, to the letter. A call that has begun stays one: it was told, and cannot be taken back.

The pieces in which the text came change nothing but how often something is told: a part is told as soon as no later
text can change it. So a caller that pushes the same text again, in whatever pieces, comes to the same place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from penstock.text.tools.call_object import CallObject, State
from penstock.text.tools.json_scan import SPACE
from penstock.text.tools.marked_call import MarkedCall
from penstock.text.tools.other_calls import KeyedCall, NamedCall, PythonList, PythonText
from penstock.text.tools.parts import CallArguments, CallBegun, CallEnded, Part, Text, add

_Call = CallObject | NamedCall | PythonText | MarkedCall | KeyedCall


@dataclass(frozen=True)
class Syntax:
    """Syntax of a family's calls."""

    mark: str
    close: str = ""  # what ends them, if anything but the end of the answer does
    before: str = SPACE + "[]"  # what may stand between the mark and the first call
    between: str = SPACE + ",]"  # and between a call and the next one
    is_bare: bool = False  # a brace that begins the answer opens calls too, if they are of tools on offer
    # A call that begins with a letter.
    unquoted: type[NamedCall] | type[PythonText] | type[MarkedCall] | type[KeyedCall] | None = None
    has_bare_lists: bool = False  # a bracket that begins the answer opens calls too: of Python, or of objects
    each: str = ""  # what opens every one of the calls, if anything does: they are no objects then


class CallParser:
    """`names` are the tools on offer. `most`: the number of calls after which it is done, and hears no more. `texts`:
    arguments of each that are texts, for families that do not write them as JSON."""

    def __init__(
        self,
        syntax: Syntax,
        names: Collection[str],
        most: int | None = None,
        texts: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        self._texts = texts or {}
        self._syntax = syntax
        self._names = names
        self._most = most
        self._parts: list[Part] = []
        self._held = ""  # text that may become a mark, or white space that may stand before one
        self._may_be_bare = syntax.is_bare
        self._is_in_calls = False
        self._raw = ""  # what was taken for the beginning of a call and not told yet, its mark included
        self._gap = ""  # what stands before the next call
        self._is_first = False  # of the calls that were opened together
        self._is_bare = False  # they have no mark
        self._call: _Call | None = None
        self._has_text = False  # after the last call
        self._had_text = False  # anywhere
        self.num_begun = 0
        self.num_ended = 0

    @property
    def is_done(self) -> bool:
        return self._most is not None and self.num_ended >= self._most

    def push(self, text: str) -> list[Part]:
        self._feed(text)
        return self._told()

    def flush(self) -> list[Part]:
        """Parts that were held back, at the end of the text."""
        if self.is_done:
            return self._told()
        if isinstance(self._call, PythonText):
            self._tell_calls(self._call.calls())
        if self._raw:
            rest, is_first = self._raw, self._is_first
            self._leave()
            if not is_first:
                rest = rest.strip(self._syntax.between)
                rest = "" if self._syntax.close.startswith(rest) else rest
            self._tell_text(rest)
        text, self._held = self._held, ""
        self._tell_text(text.rstrip() if self.num_begun else text)
        return self._told()

    def _told(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _feed(self, text: str) -> None:
        """Each of the three takes what it understands and leaves the rest."""
        while text and not self.is_done:
            if not self._is_in_calls:
                text = self._feed_text(text)
            elif self._call is None:
                text = self._feed_gap(text)
            else:
                text = self._feed_call(self._call, text)

    # -- text

    def _feed_text(self, text: str) -> str:
        text, self._held = self._held + text, ""
        if self._may_be_bare and (begun := text.lstrip()):
            self._may_be_bare = False
            if begun[0] == "{" or (begun[0] == "[" and self._syntax.has_bare_lists):
                self._open(text[: len(text) - len(begun)], is_bare=True)
                return begun
        mark = self._syntax.mark
        at = text.find(mark)
        end = at if at >= 0 else len(text) - _num_shared(text, mark)
        settled = len(text[:end].rstrip())
        self._tell_text(text[:settled])
        if at < 0:
            self._held = text[settled:]
            return ""
        self._open(text[settled : at + len(mark)])
        return text[at + len(mark) :]

    def _tell_text(self, text: str) -> None:
        if self.num_begun and not self._has_text:
            text = text.lstrip()  # what stands between a call and the text after it
            text = f"\n{text}" if text and self._had_text else text
        if text:
            self._has_text = self._had_text = True
            add(self._parts, Text(text))

    def _open(self, mark: str, *, is_bare: bool = False) -> None:
        """Begins calls at a mark, with the white space before it."""
        self._raw, self._gap, self._is_bare = mark, "", is_bare
        self._is_in_calls = self._is_first = True

    # -- between calls

    def _feed_gap(self, text: str) -> str:
        syntax = self._syntax
        for position, character in enumerate(text):
            self._raw += character
            self._gap += character
            found = self._gap.lstrip(syntax.before if self._is_first else syntax.between)
            rest = text[position + 1 :]
            if found and found == syntax.each and syntax.unquoted is not None:
                self._call = syntax.unquoted()
                return rest
            if found == "{" and not syntax.each:
                self._call = CallObject()
                return rest
            may_be_named = self._is_first and not self._is_bare and not syntax.each
            if self._is_bare and self._is_first and found.isidentifier():
                self._call = PythonList()
                for known in self._gap.lstrip():
                    self._call.take(known)
                return rest
            if may_be_named and syntax.unquoted is not None and found.isidentifier():
                self._call = syntax.unquoted()
                if isinstance(self._call, KeyedCall):
                    self._call.texts = self._texts
                for known in self._gap.lstrip():
                    self._call.take(known)
                return rest
            if found and found == syntax.close:
                self._leave()
                return rest
            if found and found == syntax.mark:
                self._open(self._gap)
                return rest
            if not any(mark.startswith(found) for mark in (syntax.close, syntax.mark, syntax.each)):
                return self._give_back(rest)
        return ""

    def _leave(self) -> None:
        self._is_in_calls, self._raw, self._call = False, "", None

    def _give_back(self, rest: str) -> str:
        """It was no call: what is to be read again as text."""
        raw = self._raw
        self._leave()
        if not self._is_first:
            return raw.lstrip(self._syntax.between) + rest
        end = 0 if self._is_bare else raw.index(self._syntax.mark) + len(self._syntax.mark)
        self._tell_text(raw[:end])
        return raw[end:] + rest

    # -- in a call

    def _feed_call(self, call: _Call, text: str) -> str:
        position = 0
        while position < len(text):
            if not self._raw and (end := call.run(text, position)) > position:
                position = end
                continue
            character = text[position]
            state = call.take(character)
            if self._raw:
                self._raw += character
                if call.name is not None and not self._begin(call.name):
                    state = State.BROKEN
            if state is not State.OPEN:
                return self._leave_call(call, state, text[position:])
            position += 1
        self._tell_arguments(call)
        return ""

    def _leave_call(self, call: _Call, state: State, text: str) -> str:
        """Ends the call; returns the text that is left, which begins with the character that ended or broke it."""
        if isinstance(call, PythonText) and state is State.ENDED:
            self._tell_calls(call.calls())
            if not self._is_in_calls:
                return text[1:]
        if self._raw:
            return self._give_back(text[1:])
        self._tell_arguments(call)
        self._end()
        return text[1:] if state is State.ENDED else text

    def _begin(self, name: str) -> bool:
        if self._is_bare and name not in self._names:
            return False  # some JSON that happens to have a name
        self._raw = ""
        add(self._parts, CallBegun(self.num_begun, name))
        self.num_begun += 1
        self._has_text = False
        return True

    def _tell_arguments(self, call: _Call) -> None:
        if text := call.taken():
            add(self._parts, CallArguments(self.num_begun - 1, text))

    def _end(self) -> None:
        add(self._parts, CallEnded(self.num_begun - 1))
        self.num_ended += 1
        self._call, self._gap, self._is_first = None, "", False

    def _tell_calls(self, calls: list[tuple[str, str]]) -> None:
        if not calls or any(name not in self._names for name, _ in calls):
            return  # it is some other Python
        self._leave()
        self._has_text = False
        for name, arguments in calls[: self._most]:
            add(self._parts, CallBegun(self.num_begun, name))
            add(self._parts, CallArguments(self.num_begun, arguments))
            self.num_begun += 1
            self._end()


def _num_shared(text: str, mark: str) -> int:
    """Number of characters of the mark that the text ends with."""
    if mark[0] not in text[1 - len(mark) :]:
        return 0
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
