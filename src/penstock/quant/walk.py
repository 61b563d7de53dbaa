"""A model on windows of text, one layer at a time: the layers are read, run and dropped one after the other, and what
is kept between them is the residual stream. Plain torch in float32: it is the weights that are judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.errors import ModelUnsupported
from penstock.core.model_config import ModelConfig
from penstock.hub.checkpoint import Checkpoint
from penstock.hub.stored import Part
from penstock.model.batch import Batch
from penstock.model.families import (
    gemma2,
    gemma3,
    glm4,
    llama,
    mixtral,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
from penstock.model.families.gemma2 import GemmaLayer
from penstock.model.layers import Attention, DecoderLayer, LayerLoader, load_norm
from penstock.model.ops import KVShape, LayerKV, Norm, Stream
from penstock.model.quantized import Weight, plain
from penstock.model.rope import layer_ropes
from penstock.model.sparse import SparseLayer
from penstock.model.weights import Weights, read_stored
from penstock.quant.opened import KeepingOps, OpenLayer

LAYERS: dict[str, Callable[[Weights], LayerLoader]] = {
    "llama": lambda _: llama.layer,
    "mistral": lambda _: llama.layer,
    "qwen2": lambda _: qwen2.layer,
    "qwen3": lambda _: qwen3.layer,
    "mixtral": lambda _: mixtral.layer,
    "qwen2_moe": lambda _: qwen2_moe.layer,
    "qwen3_moe": lambda _: qwen3_moe.layer,
    "gemma2": lambda _: gemma2.layer,
    "gemma3_text": lambda _: gemma3.layer,
    "phi3": lambda _: phi3.layer,
    "granite": lambda _: llama.layer,
    "smollm3": lambda _: llama.layer,
    "glm": lambda _: glm4.glm_layer,
    "glm4": lambda _: glm4.layer,
}
TOKENS_AT_ONCE = 2048


def check_family(config: ModelConfig) -> None:
    if config.architecture not in LAYERS:
        known = ", ".join(LAYERS)
        raise ModelUnsupported(f"the family {config.architecture!r} cannot be quantized here; those that can: {known}")


class Walk:
    """`hidden` is the residual stream before the next layer, a part per step: [tokens, hidden]."""

    def __init__(
        self, checkpoint: Checkpoint, token_ids: Tensor, device: torch.device, *, dtype: torch.dtype = torch.float32
    ) -> None:
        """`token_ids` [windows, length]. Tensors that are no linear's get rounded to `dtype`, as they are stored."""
        check_family(checkpoint.config)
        self.config = checkpoint.config
        self.ops = KeepingOps(device)
        self.token_ids = token_ids.to(device)
        self.dtype = dtype
        self._checkpoint = checkpoint
        self._ropes = layer_ropes(self.config, device)
        at_once = max(1, TOKENS_AT_ONCE // token_ids.shape[1])
        parts = torch.split(self.token_ids, at_once)
        table = self._table("model.embed_tokens.weight")
        self.hidden = [F.embedding(part.flatten(), table) * self.config.stream_scale for part in parts]
        self._batches = [_batch(part) for part in parts]
        self._cache = self._allocate(at_once, token_ids.shape[1])
        self._load = LAYERS[self.config.architecture](self._weights(checkpoint))

    def layer(self, index: int, checkpoint: Checkpoint | None = None) -> OpenLayer:
        """Layer of the checkpoint, or of another that has it."""
        weights = self._weights(checkpoint or self._checkpoint).at(f"model.layers.{index}")
        loaded = self._load(weights, self._ropes(index), index)
        assert isinstance(loaded, DecoderLayer | GemmaLayer | SparseLayer)
        opened = OpenLayer(loaded, self.config, weights.prefix, weights.sites)
        opened.narrow_routers(self.dtype)
        return opened

    def normed(self, hidden: Iterable[Tensor], norm: Norm) -> Iterator[Tensor]:
        return (self.ops.normed(Stream(part), norm) for part in hidden)

    def attended(self, qkvs: Iterable[Tensor], attention: Attention) -> list[Tensor]:
        """Inputs of the attention's output projection."""
        found = []
        for qkv, batch in zip(qkvs, self._batches, strict=True):
            self.ops.begin(batch)
            found.append(self.ops.attention(qkv, attention.spec, attention.rope, self._cache, batch))
        return found

    def add(self, found: Iterable[Tensor], norm: Norm | None) -> None:
        """Adds to the stream what a part of a layer gives, normed if there is a norm."""
        for hidden, x in zip(self.hidden, found, strict=True):
            hidden += x if norm is None else self.ops.normed(Stream(x), norm)

    def advance(self, layer: OpenLayer) -> None:
        for hidden, batch in zip(self.hidden, self._batches, strict=True):
            self.ops.begin(batch)
            layer.layer(Stream(hidden), self._cache, batch)  # adds to it

    def outputs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Outputs after the last layer, window by window: its logits and its tokens."""
        norm = load_norm(self._weights(self._checkpoint), "model.norm")
        head = self._table("model.embed_tokens.weight" if self.config.tied_embeddings else "lm_head.weight")
        length = self.token_ids.shape[1]
        windows = (window for part in self.normed(self.hidden, norm) for window in torch.split(part, length))
        return (
            (self._capped(window @ head.T), ids.long()) for window, ids in zip(windows, self.token_ids, strict=True)
        )

    def _capped(self, logits: Tensor) -> Tensor:
        logits = logits / self.config.logit_divisor
        return self.ops.capped(logits, self.config.logit_cap) if self.config.logit_cap else logits

    def _weights(self, checkpoint: Checkpoint) -> Weights:
        def read(name: str, device: torch.device, part: Part | None) -> Weight:
            found = read_stored(checkpoint, name, device, part)
            return found if len(found.shape) > 1 else self._narrow(plain(found))

        return Weights(checkpoint, read, self.ops, checkpoint.tensor_names())

    def _table(self, name: str) -> Tensor:
        return self._narrow(plain(read_stored(self._checkpoint, name, self.ops.device)))

    def _narrow(self, values: Tensor) -> Tensor:
        return values.to(self.dtype).float()

    def _allocate(self, num_windows: int, length: int) -> LayerKV:
        """A window is a block."""
        (cache,) = self.ops.allocate_kv(KVShape(1, num_windows, length, self.config.num_kv_heads, self.config.head_dim))
        return cache


def _batch(token_ids: Tensor) -> Batch:
    windows, length = token_ids.shape
    device = token_ids.device

    def ints(values: Tensor) -> Tensor:
        return values.to(device, torch.int32)

    return Batch(
        token_ids=ints(token_ids.flatten()),
        positions=ints(torch.arange(length).repeat(windows)),
        query_starts=ints(torch.arange(windows + 1) * length),
        context_lens=ints(torch.full((windows,), length)),
        block_tables=ints(torch.arange(windows)[:, None]),
        logit_rows=torch.arange(windows * length, device=device),
        num_decodes=0,
    )
