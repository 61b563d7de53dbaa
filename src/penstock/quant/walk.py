"""A model on windows of text, one layer at a time: the layers are read, run and dropped one after the other, and what
is kept between them is the residual stream. Plain torch in float32: it is the weights that are judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.errors import ModelUnsupported
from penstock.core.model_config import ModelConfig
from penstock.hub.checkpoint import Checkpoint
from penstock.model.batch import Batch
from penstock.model.families import llama, qwen2, qwen3
from penstock.model.layers import DecoderLayer, load_norm
from penstock.model.ops import KVShape, LayerKV, Norm, Rope, Stream
from penstock.model.ops.reference import ReferenceOps
from penstock.model.quantized import Weight, plain
from penstock.model.quantized.fp8 import Fp8Weight
from penstock.model.quantized.int8 import Int8Weight
from penstock.model.rope import rope_tables
from penstock.model.weights import Weights, read_stored
from penstock.quant import e4m3, integers

# Families whose layers are an attention and an MLP with a norm before each, and nothing else.
LAYERS: dict[str, Callable[[Weights, Rope, int], DecoderLayer]] = {
    "llama": llama.layer,
    "mistral": llama.layer,
    "qwen2": qwen2.layer,
    "qwen3": qwen3.layer,
}
TOKENS_AT_ONCE = 2048


@dataclass(frozen=True)
class KeptLinear:
    """A product that still knows its weight."""

    weight: Weight
    bias: Tensor | None
    wide: Tensor  # what the weight stands for

    @classmethod
    def of(cls, weight: Weight, bias: Tensor | None = None) -> KeptLinear:
        return cls(weight, bias, plain(weight).float())

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(_as_met(self.weight, x), self.wide, self.bias)


class KeepingOps(ReferenceOps):
    def linear(self, weight: Weight, bias: Tensor | None = None) -> KeptLinear:
        return KeptLinear.of(weight, None if bias is None else bias.float())


def _as_met(weight: Weight, x: Tensor) -> Tensor:
    """Activations as this weight meets them: rounded too, row by row, in the formats that do."""
    if isinstance(weight, Int8Weight):
        return integers.by_row(x).dequantized()
    return e4m3.quantized(x).dequantized() if isinstance(weight, Fp8Weight) else x


def check_family(config: ModelConfig) -> None:
    if config.architecture not in LAYERS:
        known = ", ".join(LAYERS)
        raise ModelUnsupported(f"the family {config.architecture!r} cannot be quantized here; those that can: {known}")


class Walk:
    """`hidden` is the residual stream before the next layer, a part per step: [tokens, hidden]."""

    def __init__(
        self, checkpoint: Checkpoint, token_ids: Tensor, device: torch.device, *, dtype: torch.dtype = torch.float32
    ) -> None:
        """`token_ids` [windows, length]. What no linear multiplies is rounded to `dtype`, as it will be stored."""
        check_family(checkpoint.config)
        self.config = checkpoint.config
        self.ops = KeepingOps(device)
        self.token_ids = token_ids.to(device)
        self.dtype = dtype
        self._checkpoint = checkpoint
        self._rope = rope_tables(self.config, device)
        at_once = max(1, TOKENS_AT_ONCE // token_ids.shape[1])
        parts = torch.split(self.token_ids, at_once)
        table = self._table("model.embed_tokens.weight")
        self.hidden = [F.embedding(part.flatten(), table) for part in parts]
        self._batches = [_batch(part) for part in parts]
        self._cache = self._allocate(at_once, token_ids.shape[1])

    def layer(self, index: int, checkpoint: Checkpoint | None = None) -> DecoderLayer:
        """From the checkpoint, or from another that has it."""
        weights = self._weights(checkpoint or self._checkpoint).at(f"model.layers.{index}")
        return LAYERS[self.config.architecture](weights, self._rope, index)

    def normed(self, hidden: Sequence[Tensor], norm: Norm) -> Iterator[Tensor]:
        return (self.ops.norm_linear(Stream(part), norm, lambda x: x) for part in hidden)

    def attended(self, qkvs: Iterator[Tensor], layer: DecoderLayer) -> list[Tensor]:
        """What goes into the attention's output projection."""
        found = []
        for qkv, batch in zip(qkvs, self._batches, strict=True):
            self.ops.begin(batch)
            found.append(self.ops.attention(qkv, layer.attention.spec, layer.attention.rope, self._cache, batch))
        return found

    def advance(self, layer: DecoderLayer) -> None:
        for hidden, batch in zip(self.hidden, self._batches, strict=True):
            self.ops.begin(batch)
            layer(Stream(hidden), self._cache, batch)  # adds to it

    def outputs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """After the last layer, window by window: its logits and its tokens."""
        norm = load_norm(self._weights(self._checkpoint), "model.norm")
        head = self._table("model.embed_tokens.weight" if self.config.tied_embeddings else "lm_head.weight")
        length = self.token_ids.shape[1]
        windows = (window for part in self.normed(self.hidden, norm) for window in torch.split(part, length))
        return ((window @ head.T, ids.long()) for window, ids in zip(windows, self.token_ids, strict=True))

    def _weights(self, checkpoint: Checkpoint) -> Weights:
        def read(name: str, device: torch.device) -> Weight:
            found = read_stored(checkpoint, name, device)
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
