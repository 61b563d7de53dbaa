"""From an API request to token ids: the chat template, then the tokenizer, off the event loop when the text is long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from penstock.api.openai import ChatRequest, CompletionRequest
from penstock.core.errors import InvalidRequest
from penstock.server.served_model import ServedModel
from penstock.text.prompts import render

T = TypeVar("T")

_INLINE_CHARACTERS = 2048  # tokenized in less time than a thread takes to wake up


class PromptEncoder:
    """The tokenizer lets go of the interpreter lock, so threads use the other cores."""

    def __init__(self, model: ServedModel, pool: ThreadPoolExecutor) -> None:
        self._model = model
        self._pool = pool

    async def chat(self, request: ChatRequest, given: list[list[int]] | None = None) -> list[list[int]]:
        """`given` is the prompt as a gateway rendered and tokenized it."""
        _check_given(given, 1)
        prompt_ids = given[0] if given else await self._encode_chat(request)
        return [self._model.fit_prompt(prompt_ids, keep_last=request.truncate_prompt_tokens, param="messages")]

    async def count_chat(self, request: ChatRequest) -> int:
        """The tokens of the prompt, whether or not it fits the model."""
        return len(await self._encode_chat(request))

    async def completion(self, request: CompletionRequest, given: list[list[int]] | None = None) -> list[list[int]]:
        prompts = request.prompts(self._model.config.vocab_size)
        _check_given(given, len(prompts))
        prompts = [*given] if given else prompts
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(await self._encode(texts, add_special_tokens=True))
        found = [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]
        keep_last = request.truncate_prompt_tokens
        return [self._model.fit_prompt(ids, keep_last=keep_last, param="prompt") for ids in found]

    async def _encode_chat(self, request: ChatRequest) -> list[int]:
        (prompt_ids,) = await self._encode([render(self._model.chat_template, request)], add_special_tokens=False)
        return prompt_ids

    async def _encode(self, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
        encode: Callable[[], list[list[int]]] = lambda: self._model.tokenizer.encode_batch(  # noqa: E731
            texts, add_special_tokens=add_special_tokens
        )
        if sum(map(len, texts)) <= _INLINE_CHARACTERS:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(self._pool, encode)


def _check_given(given: list[list[int]] | None, num_prompts: int) -> None:
    if given is not None and len(given) != num_prompts:
        raise InvalidRequest(f"prompt_ids: expected {num_prompts} lists, got {len(given)}", param="prompt_ids")
