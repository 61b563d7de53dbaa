"""Parts of one answer, and the whole-answer objects: chat.completion and text_completion, as bytes.

Answers in pieces are `chunks.py`. Text arrives here ready made; ids of tokens are told, and nothing is done with them.
"""

from __future__ import annotations

import codecs
import uuid
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from penstock.core.request import FinishReason

encode = msgspec.json.Encoder().encode

_PART = 256  # tokens with their alternatives
_REPLACED = "\ufffd"  # in the text of a token that is no whole character
_new_decoder = codecs.getincrementaldecoder("utf-8")
_LOWEST_LOGPROB = -9999.0  # what OpenAI sends for "impossible"; JSON has no infinity


class ResponseHead(msgspec.Struct, frozen=True):
    """Fields that every object of one response carries."""

    id: str
    model: str
    created: int  # Unix seconds
    service_tier: str | None = None  # that it was served in, where the client named one


class PromptTokensDetails(msgspec.Struct, frozen=True, omit_defaults=True):
    cached_tokens: int
    image_tokens: int = 0  # as vLLM and others call them; left out of a prompt without images


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None  # of models that reason

    @classmethod
    def of(
        cls,
        prompt_tokens: int,
        completion_tokens: int,
        cached_tokens: int = 0,
        reasoning_tokens: int | None = None,
        image_tokens: int = 0,
    ) -> Usage:
        total = prompt_tokens + completion_tokens
        details = CompletionTokensDetails(reasoning_tokens) if reasoning_tokens is not None else None
        return cls(prompt_tokens, completion_tokens, total, PromptTokensDetails(cached_tokens, image_tokens), details)


class ScoredToken(msgspec.Struct, frozen=True):
    """A token as the client reads it, with its log probability and the likeliest alternatives, best first."""

    text: str
    raw: bytes  # one token may be part of a character, which `text` cannot show
    logprob: float | None  # None: of a prompt's first token
    top: Sequence[ScoredToken] = ()
    is_shown: bool = True  # its text is in the answer; a special token's is not
    token_id: int = -1
    rank: int | None = None  # 1: the likeliest; None: not known


class Call(msgspec.Struct, frozen=True):
    """Call of a tool."""

    id: str
    name: str
    arguments: str


Finish = FinishReason | Literal["tool_calls"]


class Choice(msgspec.Struct, frozen=True):
    """One finished answer."""

    index: int
    text: str
    finish: Finish
    logprobs: Sequence[ScoredToken] | None = None
    calls: Sequence[Call] = ()
    thoughts: str | None = None  # None: the model does not reason, or its client wants none
    prompt_logprobs: Sequence[ScoredToken] | None = None  # where they are asked for by that name
    prompt_ids: Sequence[int] | None = None  # where ids are asked for, and so are
    token_ids: Sequence[int] | None = None  # the answer's, the one that ended it included


def new_id(kind: str) -> str:
    """`chatcmpl-…` or `cmpl-…`."""
    return f"{kind}-{uuid.uuid4().hex}"


def chat_completion(head: ResponseHead, choices: Sequence[Choice], usage: Usage) -> bytes:
    wire_choices = [
        {
            "index": choice.index,
            "message": _message(choice),
            "logprobs": None if choice.logprobs is None else _encoded(chat_logprobs(choice.logprobs)),
            "finish_reason": choice.finish,
            **_given(token_ids=choice.token_ids),
        }
        for choice in choices
    ]
    # vLLM's own, null where they were not asked for: its clients read them unasked.
    answer = envelope(head, "chat.completion") | {"choices": wire_choices, "usage": usage}
    if choices:  # all have the same prompt
        answer |= {"prompt_logprobs": _prompt_logprobs_of(choices[0]), "prompt_token_ids": choices[0].prompt_ids}
    return encode(answer)


def call_object(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _message(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.thoughts:  # under DeepSeek's name, which most clients read, and vLLM's
        message |= {"reasoning_content": choice.thoughts, "reasoning": choice.thoughts}
    if choice.calls:
        message |= {"content": choice.text or None, "tool_calls": [call_object(call) for call in choice.calls]}
    return message


def text_completion(head: ResponseHead, choices: Sequence[Choice], usage: Usage) -> bytes:
    wire_choices = [
        {
            "index": choice.index,
            "text": choice.text,
            "logprobs": None if choice.logprobs is None else _encoded(_text_logprobs(choice)),
            "finish_reason": choice.finish,
            "prompt_logprobs": _prompt_logprobs_of(choice),
            "prompt_token_ids": choice.prompt_ids,
            "token_ids": choice.token_ids,
        }
        for choice in choices
    ]
    return encode(envelope(head, "text_completion") | {"choices": wire_choices, "usage": usage})


def _text_logprobs(choice: Choice) -> dict[str, Any]:
    """Tokens that a stop string cut off begin where the text ends."""
    assert choice.logprobs is not None
    found = completion_logprobs(choice.logprobs)
    return found | {"text_offset": [min(offset, len(choice.text)) for offset in found["text_offset"]]}


def _given(**fields: Sequence[int] | None) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _prompt_logprobs_of(choice: Choice) -> msgspec.Raw | None:
    return None if choice.prompt_logprobs is None else _encoded_list(prompt_logprobs(choice.prompt_logprobs))


def prompt_logprobs(tokens: Sequence[ScoredToken]) -> list[dict[str, Any] | None]:
    """vLLM's: for each token, by id, itself and the likeliest in its place; nothing for the first."""
    return [
        {str(one.token_id): _ranked(one) for one in (*token.top, token)} if token.logprob is not None else None
        for token in tokens
    ]


def _ranked(token: ScoredToken) -> dict[str, Any]:
    return {"logprob": _finite(token.logprob), "rank": token.rank, "decoded_token": token.text}


def envelope(head: ResponseHead, kind: str) -> dict[str, Any]:
    found = {
        "id": head.id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": None,
    }
    return found if head.service_tier is None else found | {"service_tier": head.service_tier}


def _encoded(logprobs: dict[str, Any]) -> dict[str, Any]:
    """The same with lists in JSON, written a part at a time: no other thread runs while the encoder does."""
    return {name: value if value is None else _encoded_list(value) for name, value in logprobs.items()}


def _encoded_list(values: list[Any]) -> msgspec.Raw:
    parts = [encode(values[at : at + _PART])[1:-1] for at in range(0, len(values), _PART)]
    return msgspec.Raw(b"[%b]" % b",".join(parts))


def named_by_id(tokens: Sequence[ScoredToken]) -> list[ScoredToken]:
    """The same tokens with vLLM's `token_id:N` for their texts: two tokens may have one text, and never one id."""
    return [
        msgspec.structs.replace(token, text=f"token_id:{token.token_id}", top=named_by_id(token.top))
        for token in tokens
    ]


def chat_logprobs(tokens: Sequence[ScoredToken]) -> dict[str, Any]:
    content = [_chat_token(token) | {"top_logprobs": [_chat_token(other) for other in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


class TextOffsets:
    """Offsets of tokens in the text of a choice, in characters. A character may be made of several tokens: each of them
    begins where it does."""

    def __init__(self, before: bytes = b"") -> None:
        """`before`: the text of earlier tokens."""
        self._decoder = _new_decoder(errors="replace")
        self._next = len(self._decoder.decode(before))

    def place(self, token: ScoredToken) -> int:
        """The offset of the next token."""
        begin = self._next
        if token.is_shown:
            self._next += len(self._decoder.decode(token.raw))
        return begin


def completion_logprobs(tokens: Sequence[ScoredToken], offsets: TextOffsets | None = None) -> dict[str, Any]:
    """`offsets`: after the tokens that came before these; None: these are the first."""
    offsets = offsets or TextOffsets()
    return {
        "tokens": [_as_text(token) for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [_by_text(token) if token.logprob is not None else None for token in tokens],
        "text_offset": [offsets.place(token) for token in tokens],
    }


def _as_text(token: ScoredToken) -> str:
    """A part of a character is written as OpenAI writes it: by its bytes. Such parts would all look alike as text."""
    if _REPLACED not in token.text:
        return token.text
    try:
        return token.raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)


def _chat_token(token: ScoredToken) -> dict[str, Any]:
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(token.raw)}


def _by_text(token: ScoredToken) -> dict[str, float | None]:
    """The chosen token first, and the alternatives; of equal texts the likeliest counts."""
    found: dict[str, float | None] = {}
    for candidate in (*token.top, token):
        found.setdefault(_as_text(candidate), _finite(candidate.logprob))
    chosen = _as_text(token)
    return {chosen: found.pop(chosen), **found}


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(_LOWEST_LOGPROB, logprob)
