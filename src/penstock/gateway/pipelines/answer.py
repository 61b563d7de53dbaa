"""A pipeline's answer, as its client expects it: a chat's or a completion's, as a whole or as a stream.

The answer of the last step's model is passed on as it is, but for the names in it and the usage, which is that of all
steps. Any other value becomes a text. With `include_steps` the answer has what each step used, beside the usage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.api.openai.chunks import ChatChunks, CompletionChunks
from penstock.api.openai.responses import Choice, ResponseHead, Usage, chat_completion, text_completion
from penstock.api.sse import DONE, event
from penstock.core.request import FinishReason
from penstock.gateway.pipelines.graph import Task
from penstock.gateway.pipelines.model_call import ModelCall
from penstock.gateway.pipelines.types import as_text

_FINISH = {"length": FinishReason.LENGTH}


class StepUse(msgspec.Struct, frozen=True, omit_defaults=True):
    """An attempt at a step, as the client is told of it."""

    step: str
    kind: str
    outcome: str
    seconds: float
    attempt: int = 1  # the second try of a step is 2
    usage: Usage | None = None  # only of model steps


class PipelineAnswer:
    def __init__(self, task: Task, model: str, request_id: str, created: int, *, has_usage: bool) -> None:
        """`task`: what the client asked for; `has_usage`: its stream ends with the usage."""
        prefix = "chatcmpl" if task is Task.CHAT else "cmpl"
        self._task = task
        self._head = ResponseHead(f"{prefix}-{request_id}", model, created)
        self._has_usage = has_usage
        self._chunks: ChatChunks | CompletionChunks
        self._chunks = (ChatChunks if task is Task.CHAT else CompletionChunks)(self._head, include_usage=has_usage)
        self._own = {"id": self._head.id, "model": model, "created": created}
        self._has_begun = False

    def whole(self, value: Any, call: ModelCall | None, usage: Usage, steps: Sequence[StepUse] | None = None) -> bytes:
        """`call`: the one that made it; None: it was not made by a model, or something was done with it since.
        `steps`: None: they are not asked for."""
        if call is not None and call.answer is not None and _task_of(call) is self._task:
            return _with_steps(msgspec.json.encode(call.answer | self._own | {"usage": usage}), steps)
        choice = Choice(0, as_text(value), _finish_of(call))
        make = chat_completion if self._task is Task.CHAT else text_completion
        return _with_steps(make(self._head, [choice], usage), steps)

    # -- streams

    def part(self, document: Mapping[str, Any], call: ModelCall) -> bytes:
        """A part of the answer, as it came; empty: it says nothing to the client."""
        choices = document.get("choices")
        if not choices:
            return b""
        if _task_of(call) is self._task:
            usage = {"usage": None} if self._has_usage else {}
            kept = {key: value for key, value in document.items() if key != "usage"}
            return event(msgspec.json.encode(kept | self._own | usage))
        pieces = [(choice.get("delta") or {}).get("content") or choice.get("text") or "" for choice in choices]
        return self._text("".join(pieces))

    def value(self, value: Any) -> bytes:
        """All of an answer at once."""
        return self._text(as_text(value))

    def end(self, call: ModelCall | None, usage: Usage, steps: Sequence[StepUse] | None = None) -> bytes:
        """`call`: the one whose parts were passed on; None: there was none. `steps`: None: they are not asked for."""
        parts = []
        if call is None or _task_of(call) is not self._task:
            parts += [self._text(""), event(self._chunks.finish(0, _finish_of(call)))]
        if self._has_usage:
            parts.append(event(_with_steps(self._chunks.usage(usage), steps)))
        return b"".join([*parts, DONE])

    def _text(self, text: str) -> bytes:
        parts = []
        if not self._has_begun:
            self._has_begun = True
            if (start := self._chunks.start(0)) is not None:
                parts.append(event(start))
        if text:
            parts.append(event(self._chunks.text(0, text)))
        return b"".join(parts)


def _with_steps(document: bytes, steps: Sequence[StepUse] | None) -> bytes:
    return document if steps is None else b'%b,"steps":%b}' % (document[:-1], msgspec.json.encode(steps))


def _task_of(call: ModelCall) -> Task:
    return call.model.task


def _finish_of(call: ModelCall | None) -> FinishReason:
    return _FINISH.get(call.finish_reason or "", FinishReason.STOP) if call is not None else FinishReason.STOP
