"""The model as its server knows it: its name, its words, and how long a text may be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from penstock.core.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    UnsupportedParameter,
    UnsupportedTask,
)
from penstock.core.image_processor import ImageProcessorConfig
from penstock.core.model_config import ModelConfig
from penstock.core.request import AdapterRef
from penstock.server.text_limits import TextLimits
from penstock.text.chat import ChatTemplate
from penstock.text.prompt_encoder import kept_ids
from penstock.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedAdapter:
    """An adapter that the engine has: clients ask for it as for a model."""

    name: str
    path: str
    digest: str  # of its content
    rank: int
    pinned: bool
    created: int  # Unix seconds


@dataclass(frozen=True)
class ServedImages:
    """Settings with which images are preprocessed for the model."""

    processor: ImageProcessorConfig
    placeholder_id: int  # id of the token that stands for an image
    max_tile_tokens: int  # most tokens of a tile that the engine takes at a time


@dataclass(frozen=True)
class ServedModel:
    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    max_model_len: int
    created: int  # Unix seconds
    generates: bool = True
    embeds: bool = False
    max_loras: int = 0  # adapters that may run at a time; 0: the engine cannot run any
    adapters: dict[str, ServedAdapter] = field(default_factory=dict)  # by name; they come and go
    images: ServedImages | None = None  # None: it takes none

    @cached_property
    def texts(self) -> TextLimits:
        """Limits of texts that are embedded."""
        return TextLimits(self.tokenizer, self.max_model_len, self.config.vocab_size)

    def special_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """Ids of those texts that are special tokens."""
        found = (self.tokenizer.special_id(text) for text in texts)
        return frozenset(token_id for token_id in found if token_id is not None)

    def check_name(self, name: str) -> None:
        if name != self.name and name not in self.adapters:
            raise ModelNotFound(
                f"the model '{name[:200]}' does not exist; this server has '{self.name}'", param="model"
            )

    def adapter_of(self, name: str) -> AdapterRef | None:
        """The adapter that a request for this model runs with; None: the base model."""
        self.check_name(name)
        adapter = self.adapters.get(name)
        return AdapterRef(adapter.digest, name) if adapter is not None else None

    def check_generates(self) -> None:
        if not self.generates:
            raise UnsupportedTask(
                f"the model '{self.name}' makes no texts: it makes vectors of them, at /v1/embeddings, /v1/rerank and "
                "/v1/score",
                param="model",
            )

    def check_embeds(self) -> None:
        if not self.embeds:
            raise UnsupportedTask(
                f"the model '{self.name}' makes no vectors where it runs: it makes texts, at /v1/chat/completions, "
                "/v1/completions and /v1/messages",
                param="model",
            )

    def check_sees(self, param: str) -> ServedImages:
        if self.images is None:
            raise UnsupportedParameter(f"{param}: the model '{self.name}' takes no images", param=param)
        return self.images

    def check_base_name(self, name: str) -> None:
        """Vectors are the base model's."""
        self.check_name(name)
        if name != self.name:
            raise UnsupportedTask(f"'{name}' is an adapter: it makes texts, and no vectors", param="model")

    def check_prompt_text(self, text: str, param: str, *, contexts: int = 1) -> None:
        """Refuses a text that is longer than so many contexts whatever its tokens are, without making them."""
        if (num_tokens := self.texts.min_tokens(text)) >= contexts * self.max_model_len:
            raise ContextLengthExceeded(
                f"this model's context is {self.max_model_len} tokens, and the prompt has at least {num_tokens}",
                param=param,
            )

    def check_prompt_tokens(self, num_tokens: int, param: str) -> None:
        if num_tokens >= self.max_model_len:
            raise ContextLengthExceeded(
                f"this model's context is {self.max_model_len} tokens, and the prompt has {num_tokens}", param=param
            )

    def fit_prompt(self, prompt_ids: list[int], *, keep_last: int | None, param: str) -> list[int]:
        """The prompt as the model will see it: never empty, cut only where the client asked for it."""
        prompt_ids = kept_ids(prompt_ids, keep_last=keep_last, bos_token_id=self.config.bos_token_id, param=param)
        self.check_prompt_tokens(len(prompt_ids), param)
        if max(prompt_ids) >= self.config.vocab_size:  # a tokenizer may know more words than the model has rows for
            raise InvalidRequest(f"the text has a token, {max(prompt_ids)}, that this model does not know", param=param)
        return prompt_ids

    def check_output(self, wanted: int | None) -> None:
        """Refuses more tokens than the model can ever hold."""
        if wanted is not None and wanted > self.max_model_len:
            raise ContextLengthExceeded(
                f"max_tokens: {wanted} is more than this model's context of {self.max_model_len} tokens",
                param="max_tokens",
            )

    def fit_output(self, num_prompt_tokens: int, wanted: int | None, *, is_explicit: bool) -> int:
        """The limit of the output, in tokens. An explicit wish that does not fit is refused, a default is cut."""
        room = self.max_model_len - num_prompt_tokens
        if wanted is None:
            return room
        if wanted > room and is_explicit:
            raise ContextLengthExceeded(
                f"this model's context is {self.max_model_len} tokens: {num_prompt_tokens} in the prompt and "
                f"{wanted} for the output do not fit",
                param="max_tokens",
            )
        return min(wanted, room)
