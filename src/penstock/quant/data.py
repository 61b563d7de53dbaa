"""A text as windows of tokens, all of one length, each beginning as the model's prompts begin."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.text.tokenizer import Tokenizer

FEWEST_TOKENS = 1024  # of a text that says anything about a model


def windows(text: str, tokenizer: Tokenizer, length: int, most: int, wanted: int | None = None) -> Tensor:
    """[windows, length]: `wanted` many, or `most` if the text has that many, spread over it evenly."""
    before = tokenizer.encode("", add_special_tokens=True)  # what a prompt is given to begin with
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    own = length - len(before)  # of a window, those that are the text's
    if own < 2:
        raise ConfigError(f"windows of {length} tokens are too short", param="seq_len")
    available = len(token_ids) // own
    if wanted is not None and wanted > available:
        raise ConfigError(
            f"the text is too short: it has {len(token_ids):,} tokens, which are {available} windows of {length}, "
            f"not {wanted}",
            param="samples",
        )
    count = wanted or min(most, available)
    if count * length < min(FEWEST_TOKENS, most * length):
        if wanted is not None:
            raise ConfigError(
                f"{wanted} windows of {length} tokens are too few: a model wants {FEWEST_TOKENS:,} tokens at least",
                param="samples",
            )
        raise ConfigError(
            f"the text is too short: it has {len(token_ids):,} tokens, and a model wants {FEWEST_TOKENS:,} at least"
        )
    stride = (len(token_ids) - own) // max(count - 1, 1) if count > 1 else 0
    starts = (min(i * stride, len(token_ids) - own) for i in range(count))
    return torch.tensor([[*before, *token_ids[start : start + own]] for start in starts])
