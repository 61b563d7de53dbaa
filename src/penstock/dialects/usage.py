"""The usage of a stream whose client did not ask to be told, or left before it was."""

from __future__ import annotations

import re

import msgspec

_NO_CHOICES = re.compile(rb'"choices": ?\[\]')
_DATA = (b"\ndata:", b"\rdata:")  # the line that an event has, however its lines end and whatever stands before
_HEAD_BYTES = 8192


class _Last(msgspec.Struct):
    usage: msgspec.Raw = msgspec.Raw(b"null")
    choices: list[msgspec.Raw] = []


_decode = msgspec.json.Decoder(_Last).decode


def hide_usage(events: bytes) -> bytes:
    """Whole events, and the one that has nothing but the usage as a comment: for who keeps books, not for the client.

    The client did not ask for it, and some fail at an event without choices.
    """
    if not _NO_CHOICES.search(events):
        return events
    return b"".join([_hidden(event) for event in events.replace(b"\r\n", b"\n").split(b"\n\n") if event])


def _hidden(event: bytes) -> bytes:
    if _NO_CHOICES.search(event):
        try:
            last = _decode(event.removeprefix(b"data:"))
        except msgspec.DecodeError:
            last = _Last()
        usage = bytes(last.usage)
        if usage.startswith(b"{") and not last.choices:
            return b': {"usage":%b}\n\n' % usage.replace(b"\n", b"")
    return event + b"\n\n"


class StreamTally:
    """Counts a stream's events as they pass: about one for each token. For one that ends before its usage.

    Its beginning is kept: Anthropic's servers say there how long the prompt is, and some say it nowhere else.
    """

    __slots__ = ("_end", "head", "num_events")

    def __init__(self) -> None:
        self.num_events = 0
        self.head = b""
        self._end = b"\n"

    def append(self, data: bytes) -> None:
        """Adds as many bytes as a read brought, cut anywhere."""
        if len(self.head) < _HEAD_BYTES:
            self.head += data[: _HEAD_BYTES - len(self.head)]
        data = self._end + data
        self.num_events += sum(map(data.count, _DATA))
        self._end = data[-len(_DATA[0]) + 1 :]

    @property
    def output_tokens(self) -> int:
        """The first event is the role's, the last one or two the end's; nobody is billed for those."""
        return max(0, self.num_events - 1)
