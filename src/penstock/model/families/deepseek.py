"""DeepSeek-V2, V3 and R1, and who took their shape (Kimi-K2, GLM-4.7-Flash): multi-head latent attention, some dense
layers, then mixtures of experts behind a router of their own and beside an expert that all tokens pass. Layers that
predict further tokens (MTP), which their files may have, are not read."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.model.batch import Batch
from penstock.model.layers import MLP, decoder_of
from penstock.model.mla import LatentAttentionLayer
from penstock.model.ops import LayerKV, Rope, Stream
from penstock.model.sparse import SparseMLP
from penstock.model.weights import Weights


@dataclass(frozen=True, slots=True)
class DeepSeekLayer:
    attention: LatentAttentionLayer
    mlp: MLP | SparseMLP
    parts: None = None

    def __call__(self, stream: Stream, kv: LayerKV, batch: Batch) -> None:
        self.attention(stream, kv, batch)
        if isinstance(self.mlp, SparseMLP):
            self.mlp(stream, batch)
        else:
            self.mlp(stream)


def layer(weights: Weights, rope: Rope, index: int) -> DeepSeekLayer:
    attention = LatentAttentionLayer.load(weights, rope, index)
    return DeepSeekLayer(attention, SparseMLP.load(weights) if weights.config.has_experts(index) else MLP.load(weights))


load = decoder_of(layer)
