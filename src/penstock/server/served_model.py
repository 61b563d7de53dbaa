"""What the server knows of the model it serves: its name, its words, and how long a text may be."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from penstock.core.model_config import ModelConfig
from penstock.text.chat import ChatTemplate
from penstock.text.prompts import kept_ids
from penstock.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    max_model_len: int
    created: int  # Unix seconds

    def check_name(self, name: str) -> None:
        if name != self.name:
            raise ModelNotFound(f"the model '{name}' does not exist; this server has '{self.name}'", param="model")

    def fit_prompt(self, prompt_ids: list[int], *, keep_last: int | None, param: str) -> list[int]:
        """The prompt as the model will see it: never empty, cut only where the client asked for it."""
        prompt_ids = kept_ids(prompt_ids, keep_last=keep_last, bos_token_id=self.config.bos_token_id, param=param)
        if max(prompt_ids) >= self.config.vocab_size:  # a tokenizer may know more words than the model has rows for
            raise InvalidRequest(f"the text has a token, {max(prompt_ids)}, that this model does not know", param=param)
        if len(prompt_ids) >= self.max_model_len:
            raise ContextLengthExceeded(
                f"this model's context is {self.max_model_len} tokens, and the prompt has {len(prompt_ids)}",
                param=param,
            )
        return prompt_ids

    def fit_output(self, num_prompt_tokens: int, wanted: int | None, *, is_explicit: bool) -> int:
        """How many tokens may be generated. An explicit wish that does not fit is refused, a default is cut."""
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
