"""The events of one response, as frames ready to be sent, and the output that they add up to.

    response.created, response.in_progress
    response.output_item.added                              for each item
      response.content_part.added                           of a message or of reasoning
      response.output_text.delta …, .done                   or reasoning_text, or function_call_arguments
      response.content_part.done
    response.output_item.done
    response.completed                                      or .incomplete, or .failed

Sequence numbers rise by one, from 0. A caller that feeds the parts of an answer gets the events of each; the same parts
make the same events at every replica. A delta goes out for every token of every stream, and costs the encoding of its
text and one concatenation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from penstock.api import sse
from penstock.api.openai.responses import ScoredToken
from penstock.api.responses import objects
from penstock.api.responses.objects import Incomplete, ItemStatus, Object, ResponseHead, Usage, encode
from penstock.api.responses.request import ResponsesRequest
from penstock.core.errors import PenstockError

Kind = Literal["message", "reasoning", "call"]
_PREFIX: dict[Kind, str] = {"message": "msg", "reasoning": "rs", "call": "fc"}
_DELTA: dict[Kind, str] = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}
TERMINAL = ("response.completed", "response.incomplete", "response.failed")


class _OpenItem:
    """An output item that is being written."""

    def __init__(self, kind: Kind, item_id: str, output_index: int, call_id: str = "", name: str = "") -> None:
        self.kind = kind
        self.id = item_id
        self.texts: list[str] = []
        self.logprobs: list[Object] = []
        self._call = call_id, name
        self.place: Object = {"item_id": item_id, "output_index": output_index}
        if kind != "call":
            self.place["content_index"] = 0
        name_bytes = f"{_DELTA[kind]}.delta".encode()
        self.before = b'event: %b\ndata: {"type":"%b","sequence_number":' % (name_bytes, name_bytes)
        self.between = b',%b,"delta":' % encode(self.place)[1:-1]

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def part(self) -> Object:
        if self.kind == "reasoning":
            return objects.thought_part(self.text)
        return objects.text_part(self.text, self.logprobs)

    def value(self, status: ItemStatus, *, is_new: bool = False) -> Object:
        if self.kind == "call":
            return objects.call_item(self.id, status, *self._call, self.text)
        make = objects.reasoning_item if self.kind == "reasoning" else objects.message_item
        return make(self.id, status, [] if is_new else [self.part()])


class ResponseEvents:
    def __init__(self, head: ResponseHead, request: ResponsesRequest) -> None:
        self._head = head
        self._request = request
        self._number = 0
        self._output: list[Object] = []
        self._open: _OpenItem | None = None
        self._last: Object = {}  # the response, once it has ended

    def opening(self) -> list[bytes]:
        begun = objects.response(self._head, self._request, "in_progress")
        return [self._event(f"response.{name}", response=begun) for name in ("created", "in_progress")]

    def text(self, piece: str, logprobs: Sequence[ScoredToken] | None = None) -> list[bytes]:
        begun = self._begin("message")
        item, found = self._open, objects.scored(logprobs)
        assert item is not None
        item.texts.append(piece)
        item.logprobs += found
        return [*begun, self._delta(item, piece, b',"logprobs":%b}\n\n' % (encode(found) if found else b"[]"))]

    def reasoning(self, piece: str) -> list[bytes]:
        begun = self._begin("reasoning")
        return [*begun, self._append(piece)]

    def call(self, call_id: str, name: str) -> list[bytes]:
        return [*self.end_item(), *self._begin("call", call_id, name)]

    def arguments(self, piece: str) -> list[bytes]:
        return [self._append(piece)]

    def end_item(self, status: ItemStatus = "completed") -> list[bytes]:
        """Ends the item that is open, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return []
        delta, text = _DELTA[item.kind], item.text
        if item.kind == "call":
            ended = [self._event(f"{delta}.done", **item.place, arguments=text)]
        else:
            scores = {"logprobs": item.logprobs} if item.kind == "message" else {}
            ended = [
                self._event(f"{delta}.done", **item.place, text=text, **scores),
                self._event("response.content_part.done", **item.place, part=item.part()),
            ]
        value, index = item.value(status), len(self._output)
        self._output.append(value)
        return [*ended, self._event("response.output_item.done", output_index=index, item=value)]

    def finish(self, usage: Usage | None, *, incomplete: Incomplete | None = None) -> list[bytes]:
        """The last events. A response without an item gets a message of no text: clients look for one. `incomplete`:
        why there is no more of it."""
        status: Literal["incomplete", "completed"] = "completed" if incomplete is None else "incomplete"
        begun = [] if self._output or self._open else self._begin("message")
        ended = self.end_item(status)
        self._last = objects.response(self._head, self._request, status, self._output, usage, incomplete=incomplete)
        return [*begun, *ended, self._event(f"response.{status}", response=self._last)]

    def fail(self, error: PenstockError, usage: Usage | None = None) -> list[bytes]:
        """The last event of a response that broke off, with what there was of it."""
        output = [*self._output, self._open.value("incomplete")] if self._open is not None else self._output
        told = objects.error_object(error)
        self._last = objects.response(self._head, self._request, "failed", output, usage, told)
        return [self._event("response.failed", response=self._last)]

    @property
    def whole(self) -> bytes:
        """The response object, once it has ended."""
        return encode(self._last)

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> list[bytes]:
        """Begins an item, unless one of this kind is open."""
        if self._open is not None and self._open.kind == kind:
            return []
        ended, index = self.end_item(), len(self._output)
        item = self._open = _OpenItem(kind, f"{_PREFIX[kind]}_{self._head.id}_{index}", index, call_id, name)
        added = [
            *ended,
            self._event("response.output_item.added", output_index=index, item=item.value("in_progress", is_new=True)),
        ]
        if kind != "call":
            added.append(self._event("response.content_part.added", **item.place, part=item.part()))
        return added

    def _append(self, piece: str) -> bytes:
        item = self._open
        assert item is not None
        item.texts.append(piece)
        return self._delta(item, piece, b"}\n\n")

    def _delta(self, item: _OpenItem, piece: str, end: bytes) -> bytes:
        number, self._number = self._number, self._number + 1
        return b"%b%d%b%b%b" % (item.before, number, item.between, encode(piece), end)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return sse.event(encode({"type": kind, "sequence_number": number, **fields}), kind.encode())
