"""Facts of a request for rules: read from its body, and only as much as the rules ask for.

How long a prompt is, is counted where a rule's outcome hangs on it and the model's words are known; else estimated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec

from penstock.core.errors import PenstockError
from penstock.gateway.proxy.body_reader import BodyReader
from penstock.gateway.proxy.request_view import RequestView
from penstock.gateway.proxy.routed_request import RoutedRequest
from penstock.gateway.tokens.prompt_tokens import PromptTokens
from penstock.router.rules import Facts, RuleSet

Then = Callable[[Facts | None, PenstockError | None], None]

TASK = "x-penstock-task"  # a header, or a field of metadata
_TASK_HEADER = TASK.encode()
_MAX_TEXT = 4096  # characters from the beginning of a message, and as many from its end
_MAX_BACK = 32  # messages that the last words of the user are looked for in
_FAR = 4  # an estimate that is so many times a bound is beyond it
_MAX_COUNTING = 64


class _Format(msgspec.Struct):
    type: str = ""


class _Text(msgspec.Struct):
    format: _Format | None = None


class _Head(msgspec.Struct):
    tools: list[msgspec.Raw] | None = None
    functions: list[msgspec.Raw] | None = None
    response_format: _Format | None = None
    metadata: dict[str, msgspec.Raw] | None = None
    text: _Text | None = None  # of /v1/responses, with input


class _Message(msgspec.Struct):
    role: str = ""
    content: msgspec.Raw = msgspec.Raw()


class _Whole(_Head):
    messages: list[_Message] = []
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()

    @property
    def turns(self) -> list[_Message]:
        if self.messages or bytes(self.input)[:1] != b"[":
            return self.messages
        try:
            return _inputs.decode(self.input)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # of texts that are to be embedded
            return []


class _Part(msgspec.Struct):
    type: str = ""
    text: str = ""


_heads = msgspec.json.Decoder(_Head)
_wholes = msgspec.json.Decoder(_Whole)
_inputs = msgspec.json.Decoder(list[_Message])
_contents = msgspec.json.Decoder(str | list[_Part])


def with_facts(rules: RuleSet, routed: RoutedRequest, tokens: PromptTokens, bodies: BodyReader, then: Then) -> None:
    """Calls `then` at once, or from the event loop where a long prompt is counted or a large body read in a thread."""

    def read(prompt_tokens: int) -> None:
        try:
            bodies.run(routed.body, partial(_facts, rules, routed, prompt_tokens), then)
        except PenstockError as error:  # too much is being read
            then(None, error)

    counted = _prompt_tokens(rules, routed, tokens)
    if isinstance(counted, int):
        read(counted)
    else:
        counted.add_done_callback(lambda done: read(_result(done, tokens.estimate(len(routed.body)))))


def _prompt_tokens(rules: RuleSet, routed: RoutedRequest, tokens: PromptTokens) -> int | asyncio.Future[int]:
    body, prompt_tokenizer, bounds = routed.body, tokens.prompt_tokenizer, rules.bounds
    estimate = tokens.estimate(len(body)) if bounds else 0
    if prompt_tokenizer is None or not bounds or estimate > _FAR * max(bounds[-1], 1024):
        return estimate
    if len(body) < bounds[0] and prompt_tokenizer.bound(body) < bounds[0]:  # it is never less than the body's length
        return estimate
    if tokens.num_counting >= _MAX_COUNTING:
        return estimate
    try:
        return tokens.count(routed.surface.path, body, routed.caller.tenant.namespace)
    except Exception:  # what is wrong with it is for its replica to say
        return estimate


def _result(done: asyncio.Future[int], estimate: int) -> int:
    return estimate if done.cancelled() or done.exception() is not None else done.result()


def _facts(rules: RuleSet, routed: RoutedRequest, prompt_tokens: int) -> Facts:
    view: RequestView = routed.view
    task = routed.exchange.request.headers.get(_TASK_HEADER, b"").decode(errors="replace")
    found = _read(routed.body, rules) if rules.needs_body else None
    if found is None:
        return Facts(prompt_tokens, view.output_limit, task=task)
    messages = found.turns if isinstance(found, _Whole) else []
    return Facts(
        prompt_tokens,
        view.output_limit,
        num_messages=len(messages),
        num_tools=len(found.tools or found.functions or ()),
        response_format=_format(found),
        task=task or _text(_field(found, TASK)),
        text=_last_words(found) if isinstance(found, _Whole) else "",
    )


def _read(body: bytes, rules: RuleSet) -> _Head | None:
    """None: it is not as its replica will want it, and the replica will say so."""
    try:
        return (_wholes if rules.needs_text else _heads).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _format(found: _Head) -> str:
    asked = found.response_format or (found.text.format if found.text is not None else None)
    kind = asked.type if asked is not None else ""
    return "" if kind == "text" else kind


def _field(found: _Head, name: str) -> msgspec.Raw:
    return (found.metadata or {}).get(name, msgspec.Raw())


def _last_words(found: _Whole) -> str:
    if not found.turns:
        return _bounded(_text(found.prompt) or _text(found.input))
    for message in found.turns[: -_MAX_BACK - 1 : -1]:
        if message.role == "user" and (text := _text(message.content)):
            return _bounded(text)
    return ""


def _text(content: msgspec.Raw) -> str:
    """Returns a text, or the parts of one that are text."""
    try:
        found = _contents.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return (
        found
        if isinstance(found, str)
        else "\n".join([part.text for part in found if part.type in ("text", "input_text")])
    )


def _bounded(text: str) -> str:
    return text if len(text) <= 2 * _MAX_TEXT else f"{text[:_MAX_TEXT]}\n{text[-_MAX_TEXT:]}"
