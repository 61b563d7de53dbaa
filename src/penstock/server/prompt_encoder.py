"""From an API request to token ids: the chat template, then the tokenizer. Long texts take a while: see `offload`."""

from __future__ import annotations

from functools import partial

from penstock.api.openai import ChatRequest, CompletionRequest
from penstock.core.errors import InvalidRequest
from penstock.server.served_model import MAX_CONTEXTS, ServedModel
from penstock.text.prompts import render


class PromptEncoder:
    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def chat(self, request: ChatRequest, given: list[list[int]] | None = None) -> list[list[int]]:
        """`given` is the prompt as a gateway rendered and tokenized it."""
        _check_given(given, 1)
        keep_last = request.truncate_prompt_tokens
        found = given or self._encode([self._render(request)], keep_last, "messages", add_special_tokens=False)
        return [self._model.fit_prompt(ids, keep_last=keep_last, param="messages") for ids in found]

    def count_chat(self, request: ChatRequest) -> int:
        """The tokens of the prompt, whether or not it fits the model."""
        text = self._render(request)
        self._model.check_prompt_text(text, "messages", contexts=MAX_CONTEXTS)
        (count,) = self._model.tokenizer.count([text], add_special_tokens=False)
        return count

    def completion(self, request: CompletionRequest, given: list[list[int]] | None = None) -> list[list[int]]:
        prompts = request.prompts(self._model.config.vocab_size)
        _check_given(given, len(prompts))
        prompts = [*given] if given else prompts
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        keep_last = request.truncate_prompt_tokens
        encoded = iter(self._encode(texts, keep_last, "prompt", add_special_tokens=True))
        found = [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]
        return [self._model.fit_prompt(ids, keep_last=keep_last, param="prompt") for ids in found]

    def _render(self, request: ChatRequest) -> str:
        return render(self._model.chat_template, request)

    def _encode(
        self, texts: list[str], keep_last: int | None, param: str, *, add_special_tokens: bool
    ) -> list[list[int]]:
        """Texts that cannot fit are refused before they are tokenized, or else before there are ids, unless cut."""
        for text in texts:
            self._model.check_prompt_text(text, param, contexts=1 if keep_last is None else MAX_CONTEXTS)
        check = None if keep_last is not None else partial(self._model.check_prompt_tokens, param=param)
        return self._model.tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens, check=check)


def _check_given(given: list[list[int]] | None, num_prompts: int) -> None:
    if given is not None and len(given) != num_prompts:
        raise InvalidRequest(f"prompt_ids: expected {num_prompts} lists, got {len(given)}", param="prompt_ids")
