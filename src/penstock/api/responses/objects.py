"""The response object and its output items, as values that become JSON. Text arrives here ready made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from penstock.api.errors import http_error
from penstock.api.openai.responses import ScoredToken, chat_logprobs
from penstock.api.responses.request import Kept, ResponsesRequest
from penstock.core.errors import InvalidRequest, PenstockError

encode = msgspec.json.Encoder().encode

Object = dict[str, Any]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
Incomplete = Literal["max_output_tokens", "content_filter"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ResponseHead(msgspec.Struct, frozen=True):
    id: str  # without what comes before it: resp_, msg_, fc_ and rs_
    created: int  # Unix seconds

    @property
    def response_id(self) -> str:
        return f"resp_{self.id}"


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0
    image_tokens: int | msgspec.UnsetType = msgspec.UNSET  # set only for prompts with images


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(
        cls,
        prompt_tokens: int,
        output_tokens: int,
        cached_tokens: int = 0,
        reasoning_tokens: int = 0,
        image_tokens: int = 0,
    ) -> Usage:
        cached = InputTokensDetails(cached_tokens, image_tokens=image_tokens or msgspec.UNSET)
        reasoning = OutputTokensDetails(reasoning_tokens)
        return cls(prompt_tokens, cached, output_tokens, reasoning, prompt_tokens + output_tokens)


def response(
    head: ResponseHead,
    request: ResponsesRequest,
    status: Status,
    output: Sequence[Object] = (),
    usage: Usage | None = None,
    error: Object | None = None,
    incomplete: Incomplete | None = None,
) -> Object:
    """The usage is the last member: whoever keeps books looks for it at the end of an answer."""
    reasoning, kept = request.reasoning, request.kept or Kept()
    return {
        "id": head.response_id,
        "object": "response",
        "created_at": head.created,
        "status": status,
        "background": kept.background,
        "error": error,
        "incomplete_details": None if incomplete is None else {"reason": incomplete},
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "model": request.model,
        "output": list(output),
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": kept.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort if reasoning is not None else None, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": kept.store,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": request.format.to_wire(), "verbosity": "medium"},
        "tool_choice": request.tool_choice or "auto",
        "tools": [tool.to_wire() for tool in request.tools or () if tool.is_function],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": request.truncation or "disabled",
        "user": request.user,
        "usage": usage,
    }


def error_object(error: PenstockError) -> Object:
    """The error of a response that failed. OpenAI's own codes come first: clients branch on them."""
    code = "invalid_prompt" if isinstance(error, InvalidRequest) else "server_error"
    if http_error(error).status == 429:
        code = "rate_limit_exceeded"
    return {"code": code, "message": f"{error.code}: {error.message}"}


def message_item(item_id: str, status: ItemStatus, content: Sequence[Object]) -> Object:
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": list(content)}


def text_part(text: str, logprobs: Sequence[Object] = ()) -> Object:
    return {"type": "output_text", "annotations": [], "logprobs": list(logprobs), "text": text}


def call_item(item_id: str, status: ItemStatus, call_id: str, name: str, arguments: str) -> Object:
    return {
        "id": item_id,
        "type": "function_call",
        "status": status,
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }


def reasoning_item(item_id: str, status: ItemStatus, content: Sequence[Object]) -> Object:
    return {
        "id": item_id,
        "type": "reasoning",
        "status": status,
        "summary": [],
        "content": list(content),
        "encrypted_content": None,
    }


def thought_part(text: str) -> Object:
    return {"type": "reasoning_text", "text": text}


def scored(tokens: Sequence[ScoredToken] | None) -> list[Object]:
    found: list[Object] = chat_logprobs(tokens or ())["content"]
    return found
