"""A model's size in bytes and operations, in its number formats: the arithmetic under every roofline. No device."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.capacity.formats import BYTES, Formats
from penstock.core.model_config import INT8_KV_SCALE_BYTES, Experts, ModelConfig


@dataclass(frozen=True)
class ModelBytes:
    config: ModelConfig
    formats: Formats = Formats()  # noqa: RUF009 (frozen)

    @property
    def head_parameters(self) -> int:
        return self.config.vocab_size * self.config.hidden_size

    @property
    def linear_parameters(self) -> int:
        """Norms too: they are few."""
        tables = self.head_parameters * (1 if self.config.tied_embeddings else 2)
        return self.config.num_parameters - tables

    @property
    def read_bytes(self) -> int:
        """Weights that a step of many tokens reads: all but the embedding, of which it reads a few rows. A tied one is
        the head."""
        return int(self.linear_bytes + BYTES[self.formats.dtype] * self.head_parameters)

    @property
    def linear_bytes(self) -> float:
        """Bytes of all linear weights. With MXFP4 only the experts are in 4 bits."""
        small, rest = self.linear_parameters, 0
        if self.formats.weights == "mxfp4":
            small = self.config.num_expert_parameters
            rest = self.linear_parameters - small
        return BYTES[self.formats.weights] * small + BYTES[self.formats.dtype] * rest

    @property
    def expert_bytes(self) -> int:
        """The part of `linear_bytes` that all the routed experts have; see `experts_read`."""
        return int(BYTES[self.formats.weights] * self.config.num_expert_parameters)

    def read_bytes_of(self, tokens: float) -> float:
        """Returns the bytes that a step of so many tokens reads: of a mixture only experts that somebody was given."""
        return self.read_bytes - self.expert_bytes * (1.0 - experts_read(self.config.experts, tokens))

    @property
    def stored_bytes(self) -> int:
        embedding = 0 if self.config.tied_embeddings else self.head_parameters
        return self.read_bytes + int(BYTES[self.formats.dtype] * embedding)

    @property
    def kv_bytes_per_token(self) -> int:
        scale_bytes = INT8_KV_SCALE_BYTES if self.formats.kv == "int8" else 0
        return self.config.kv_bytes_per_token(int(BYTES[self.formats.kv]), scale_bytes)

    @property
    def linear_flops_per_token(self) -> int:
        """The operations of linear layers for a token; of a mixture, only what a token passes."""
        products = self.linear_parameters - self.config.num_parameters + self.config.num_active_parameters
        return 2 * products + self._state_flops_per_token

    @property
    def _state_flops_per_token(self) -> int:
        """Operations on recurrent states: each is decayed, read by the key, updated, and read by the query."""
        linear = self.config.linear
        return 0 if linear is None else 7 * len(linear.layers) * linear.values_size * linear.key_dim

    @property
    def head_flops_per_token(self) -> int:
        """The operations of the head for a token that is chosen; a prompt's tokens but its last need none."""
        return 2 * self.head_parameters

    @property
    def flops_per_pair(self) -> int:
        """The operations of attention, for one token that looks at one token of context, in all layers."""
        key, value = self.config.head_dim, self.config.cached_value_dim or self.config.head_dim
        return 2 * (key + value) * self.config.num_heads * self.config.num_attention_layers


def experts_read(experts: Experts | None, tokens: float) -> float:
    """The share of the experts that a step of so many tokens needs, if each token's are drawn evenly."""
    return share_read(experts.per_token / experts.count if experts is not None else 1.0, tokens)


def share_read(of_token: float, tokens: float) -> float:
    """The same, of experts of which each token is given this share."""
    return float(1.0 - (1.0 - of_token) ** tokens)


def pairs(start: int, end: int) -> int:
    """Returns how many tokens of context those at positions [start, end) look at: one at p sees p + 1, its own too."""
    return (end * (end + 1) - start * (start + 1)) // 2
