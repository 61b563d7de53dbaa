"""vLLM's /tokenize and /detokenize, and /v1/chat/completions/render: texts and chats as token ids, and back."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.api.decoding import NotBuilt, Refused, WireStruct, decode
from penstock.api.openai.chat import ChatRequest, Message
from penstock.api.openai.generation import TokenId
from penstock.api.openai.tools import MAX_TOOLS, ToolDefinition

TOKENIZE_PATHS = ("/tokenize", "/v1/tokenize")  # vLLM's, and SGLang's
DETOKENIZE_PATHS = ("/detokenize", "/v1/detokenize")
RENDER_PATH = "/v1/chat/completions/render"

encode = msgspec.json.Encoder().encode
ModelName = Annotated[str, Meta(min_length=1)]


class TokenizeRequest(WireStruct):
    """Either a prompt, as of /v1/completions, or the messages of a chat."""

    model: ModelName | None = None  # None: the one that is served
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None  # a prompt has them unless told otherwise; a chat has its template's
    return_token_strs: bool | None = None

    # Options of how a chat becomes a prompt.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)] | None = None
    chat_template: Annotated[Any, NotBuilt()] = None
    mm_processor_kwargs: Annotated[Any, NotBuilt({})] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.prompt is None) == (self.messages is None):
            raise Refused("prompt", "give either prompt or messages")
        if self.messages is None:
            of_chats = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")
            for name in of_chats:
                if getattr(self, name):
                    raise Refused(name, "is only allowed with messages")
        self.chat()  # or refused

    def chat(self) -> ChatRequest | None:
        if self.messages is None:
            return None
        return ChatRequest(
            model=self.model or "",
            messages=self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
            tools=self.tools,
        )

    def adds_special_tokens(self) -> bool:
        return self.messages is None if self.add_special_tokens is None else self.add_special_tokens


class DetokenizeRequest(WireStruct, kw_only=True):
    model: ModelName | None = None
    tokens: list[TokenId]


_TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


def parse_tokenize(body: bytes) -> TokenizeRequest:
    return decode(_TOKENIZE, body)


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    return decode(_DETOKENIZE, body)


def tokenized(token_ids: list[int], max_model_len: int, token_strs: list[str] | None) -> bytes:
    return encode(
        {"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids, "token_strs": token_strs}
    )


def detokenized(text: str) -> bytes:
    return encode({"prompt": text})


def rendered(model: str, text: str, token_ids: list[int]) -> bytes:
    """The ids are under vLLM's name; the text is penstock's own."""
    return encode({"model": model, "prompt": text, "token_ids": token_ids})
