"""One attempt of a model step: a request inside the gateway, which is limited, routed and failed over as a client's.

`ModelCall` is told its answer as it comes. The text of an answer that goes to the client is passed on piece by piece;
all others are gathered, within bounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from penstock.api.oip.tensor_call import TENSORS_PATH
from penstock.core.errors import (
    BudgetExhausted,
    EngineFailed,
    PenstockError,
    StepFailed,
    all_errors,
)
from penstock.gateway.pipelines.calls import Call
from penstock.gateway.pipelines.graph import ModelStep, Task
from penstock.gateway.pipelines.machine import Failure
from penstock.gateway.pipelines.tensors import read_tensors, tensor_body
from penstock.gateway.records.token_usage import NO_TOKENS, TokenUsage, find_usage
from penstock.http.exchange import Exchange, NoChannel
from penstock.http.message import Request, by_name

CHAT_PATH, COMPLETION_PATH = b"/v1/chat/completions", b"/v1/completions"
PATHS = {
    Task.CHAT: CHAT_PATH,
    Task.COMPLETION: COMPLETION_PATH,
    Task.EMBEDDINGS: b"/v1/embeddings",
    Task.CLASSIFICATION: b"/classify",
    Task.RERANK: b"/v1/rerank",
    Task.TENSORS: TENSORS_PATH.encode(),
}
# Fields of a client's request that the step which answers is sent, unless its `forward` says otherwise.
FORWARDED = ("max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "seed")
# Fields of the client's request that every text step gets, so that all have the same cache and urgency.
_OF_ALL = ("user", "prompt_cache_key", "service_tier", "priority")
_MAX_BYTES = 8 << 20  # of an answer that is gathered
_MAX_EVENT_BYTES = 2 << 20
_TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504, 529)
_ERRORS = {cls.code: cls for cls in all_errors()}
_HEADERS_KEPT = (b"x-penstock-max-wait",)


def request_of(call: Call, client: Mapping[str, Any], *, is_stream: bool, headers: dict[bytes, bytes]) -> Request:
    """The request of a step. `client`: fields of the client's own."""
    step = call.step
    assert isinstance(step, ModelStep)
    if step.task is Task.TENSORS:
        return _request(step, headers, tensor_body(step, call.arguments), b"application/octet-stream")
    body: dict[str, Any] = {"model": step.model}
    if step.task is Task.CHAT:
        body["messages"] = call.messages
    elif step.task is Task.COMPLETION:
        body["prompt"] = call.prompt
    elif step.task is Task.RERANK:
        body |= {"query": call.query, "documents": call.texts}
    else:
        body["input"] = list(call.texts) if call.is_list else call.texts[0]
    forward = step.forward if step.forward is not None else FORWARDED if call.is_answer else ()
    names = (*forward, *_OF_ALL) if step.task.generates else forward
    body |= {name: client[name] for name in names if client.get(name) is not None}
    if step.schema is not None:
        schema = {"name": "answer", "schema": step.schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif step.choice:
        body["structured_outputs"] = {"choice": step.choice}
    body |= step.parameters
    if is_stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return _request(step, headers, msgspec.json.encode(body), b"application/json")


def _request(step: ModelStep, headers: dict[bytes, bytes], data: bytes, content_type: bytes) -> Request:
    typed = {b"content-type": content_type, b"content-length": b"%d" % len(data)}
    return Request(b"POST", PATHS[step.task], headers | typed, data)


def headers_of(client: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Headers of a client's request that its steps have too."""
    return {name: client[name] for name in _HEADERS_KEPT if name in client}


class CallListener(Protocol):
    """Listener that is told how a call fares: `finished` or `failed` once, unless it was cancelled."""

    def passed_on(self, call: ModelCall, chunk: dict[str, Any]) -> None:
        """A part of a streamed answer."""

    def finished(self, call: ModelCall, value: Any) -> None: ...
    def failed(self, call: ModelCall, failure: Failure) -> None: ...


class ModelCall:
    def __init__(self, attempt: int, call: Call, listener: CallListener) -> None:
        self.attempt = attempt
        self.call = call
        self.exchange: StepExchange | None = None
        self.usage: TokenUsage = NO_TOKENS  # as the answer says
        self.finish_reason: str | None = None
        self.answer: dict[str, Any] | None = None  # a whole one
        self._listener: CallListener | None = listener
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._is_stream = False
        self._parts: list[bytes] = []
        self.num_bytes = 0  # of its answer
        self._text: list[str] = []
        self._events = EventReader()

    def begin(self, request: Request, peer: str) -> StepExchange:
        self.exchange = StepExchange(request, peer, self)
        return self.exchange

    def cancel(self) -> None:
        self._listener = None
        if self.exchange is not None:
            self.exchange.lost()

    # -- what the exchange is told

    def started(self, status: int, headers: bytes) -> None:
        self._status, self._headers = status, by_name(headers)
        is_stream = self._headers.get(b"content-type", b"").startswith(b"text/event-stream")
        self._is_stream = is_stream and status == 200

    def wrote(self, data: bytes, is_last: bool) -> None:
        if self._listener is None:
            return
        try:
            if self._is_stream:
                self._read_events(data)
            else:
                self._gather(data)
            if is_last:
                self._end()
        except PenstockError as error:
            self._fail(Failure(error))

    def broke(self) -> None:
        self._fail(Failure(EngineFailed("the answer broke off")))

    # -- inside

    def _gather(self, data: bytes) -> None:
        self.num_bytes += len(data)
        if self.num_bytes > _MAX_BYTES:
            raise StepFailed(f"its answer is larger than {_MAX_BYTES >> 20} MiB", reason="too_large")
        self._parts.append(data)

    def _read_events(self, data: bytes) -> None:
        for event in self._events.read(data):
            if self._listener is None:
                return
            if "error" in event:
                self._fail(Failure(_error_of(event, 500, None)))
                return
            self._usage_of(event)
            for choice in event.get("choices") or ():
                text = (choice.get("delta") or {}).get("content") or choice.get("text")
                if isinstance(text, str):
                    self.num_bytes += len(text)
                    if self.num_bytes > _MAX_BYTES:
                        raise StepFailed(f"its answer is larger than {_MAX_BYTES >> 20} MiB", reason="too_large")
                    self._text.append(text)
                self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self._listener.passed_on(self, event)

    def _usage_of(self, document: dict[str, Any]) -> None:
        if document.get("usage"):
            found = find_usage(b'"usage":%b' % msgspec.json.encode(document["usage"]))
            self.usage = found or self.usage

    def _end(self) -> None:
        if self._listener is None:
            return
        if self._is_stream:
            if not self._events.is_done and self.finish_reason is None:
                raise EngineFailed("the answer broke off")
            self._finish("".join(self._text))
            return
        body = b"".join(self._parts)
        if self._status != 200:
            wait = self._headers.get(b"retry-after", b"")
            retry_after_s = float(wait) if wait.isdigit() and len(wait) < 7 else None
            error = _error_of(_decoded(body), self._status, retry_after_s)
            is_of_tenant = isinstance(error, BudgetExhausted)  # its rate limits are those of the whole
            may_retry = self._status in _TRY_AGAIN and not is_of_tenant
            self._fail(Failure(error, may_retry=may_retry, may_fall_back=not is_of_tenant))
            return
        if self.model.task is Task.TENSORS:
            self._finish(read_tensors(self.model, body))
            return
        document = self.answer = _decoded(body)
        self._usage_of(document)
        self._finish(_read_document(self, document))

    @property
    def model(self) -> ModelStep:
        assert isinstance(self.call.step, ModelStep)
        return self.call.step

    def _read_chat(self, document: dict[str, Any]) -> Any:
        choice = document["choices"][0]
        self.finish_reason = choice.get("finish_reason")
        return choice["message"].get("content") or ""

    def _read_completion(self, document: dict[str, Any]) -> Any:
        choice = document["choices"][0]
        self.finish_reason = choice.get("finish_reason")
        return choice["text"]

    def _read_vectors(self, document: dict[str, Any]) -> Any:
        found = [one["embedding"] for one in sorted(document["data"], key=lambda one: one["index"])]
        return self._one_or_all(found)

    def _read_labels(self, document: dict[str, Any]) -> Any:
        found = [_label_of(one) for one in sorted(document["data"], key=lambda one: one["index"])]
        return self._one_or_all(found)

    def _read_ranking(self, document: dict[str, Any]) -> Any:
        """Best first; as few as were asked for."""
        ranked = [(one["index"], one["relevance_score"]) for one in document["results"]]
        return [{"index": index, "score": score, "text": self.call.texts[index]} for index, score in ranked]

    def _one_or_all(self, found: list[Any]) -> Any:
        if len(found) != len(self.call.texts):
            raise StepFailed(f"it answered {len(found)} of {len(self.call.texts)} texts", reason="wrong_result")
        return found if self.call.is_list else found[0]

    def _finish(self, value: Any) -> None:
        step = self.model
        if step.choice and isinstance(value, str):
            value = value.strip()
        elif step.schema is not None:
            value = _read_json(value, self.finish_reason)
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.finished(self, value)

    def _fail(self, failure: Failure) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.failed(self, failure)
        if self.exchange is not None and self.exchange.is_open:  # nobody reads what is still made
            asyncio.get_running_loop().call_soon(self.exchange.lost)  # not from inside one of its calls


def _read_document(call: ModelCall, document: dict[str, Any]) -> Any:
    try:
        return _SHAPES[call.model.task](call, document)
    except (LookupError, TypeError, AttributeError):
        raise StepFailed("its answer is not what such a model answers", reason="wrong_result") from None


_SHAPES: dict[Task, Callable[[ModelCall, dict[str, Any]], Any]] = {
    Task.CHAT: ModelCall._read_chat,
    Task.COMPLETION: ModelCall._read_completion,
    Task.EMBEDDINGS: ModelCall._read_vectors,
    Task.CLASSIFICATION: ModelCall._read_labels,
    Task.RERANK: ModelCall._read_ranking,
}


def _label_of(one: dict[str, Any]) -> Any:
    """vLLM's form: the likeliest label, and probabilities without names where there are names for them nowhere."""
    scores = one.get("scores")
    if isinstance(scores, dict):
        return {"label": one["label"], "scores": scores}
    probabilities = one.get("probs") or []
    return {"label": one["label"], "scores": {one["label"]: max(probabilities)} if probabilities else {}}


def _read_json(value: object, finish_reason: str | None) -> Any:
    try:
        return msgspec.json.decode(str(value))
    except (msgspec.DecodeError, RecursionError):
        why = ": it was cut off at its output limit" if finish_reason == "length" else ""
        raise StepFailed(f"its answer is not JSON{why}", reason="wrong_result") from None


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {}


def _error_of(document: dict[str, Any], status: int, retry_after_s: float | None) -> PenstockError:
    told = document.get("error")
    told = told if isinstance(told, dict) else {}
    message, code, reason = (
        str(told.get("message") or f"refused with status {status}"),
        told.get("code"),
        told.get("reason"),
    )
    kind = _ERRORS.get(str(code), StepFailed)
    if kind is PenstockError:
        kind = StepFailed
    return kind(message, reason=reason if isinstance(reason, str) else None, retry_after_s=retry_after_s)


class EventReader:
    """Server-sent events, each a document of JSON, from bytes that may be cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""
        self.is_done = False

    def read(self, data: bytes) -> list[dict[str, Any]]:
        """The documents that are complete. Raises StepFailed for an event without an end."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise StepFailed(f"an event of its answer is larger than {_MAX_EVENT_BYTES >> 20} MiB", reason="too_large")
        found = []
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                self.is_done = True
            elif document := _decoded(payload):
                found.append(document)
        return found


class StepExchange(Exchange):
    """An exchange inside the gateway: what the application writes is told to a call."""

    __slots__ = ("_call",)

    def __init__(self, request: Request, peer: str, call: ModelCall) -> None:
        super().__init__(NoChannel(peer), request, False, False)
        self._call = call

    def start(
        self, status: int, headers: bytes, *, length: int | None = None, data: bytes = b"", is_last: bool = False
    ) -> None:
        if not self.is_open:
            return
        assert not self.is_started, "an exchange is answered once"
        self.is_started = True
        self._call.started(status, headers)
        self.write(data, is_last)

    def write(self, data: bytes, is_last: bool = False) -> None:
        if not self.is_open:
            return
        if is_last:
            self._over()
        self._call.wrote(data, is_last)

    def abort(self) -> None:
        super().abort()
        self._call.broke()
