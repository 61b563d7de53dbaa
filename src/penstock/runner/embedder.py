"""Vectors and scores of whole texts: by an encoder, or by a decoder that generates as well.

A decoder computes its texts at once in blocks of its own, apart from the cache of those who generate: every state of
every token is needed here, and a cached prefix has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from penstock.core.errors import ModelUnsupported
from penstock.hub.encoder import EncoderCheckpoint, Pooling
from penstock.model.batch import Batch
from penstock.model.encoder import Encoder, load_encoder
from penstock.model.layers import CausalLM, Decoder
from penstock.model.ops import KVShape, LayerKV, Ops, Scaled, Stream
from penstock.model.texts import Texts

_ENCODER_TOKENS = {"cpu": 4096, "cuda": 65536}  # in a batch: more is not faster, and others wait longer


class EncoderEmbedder:
    def __init__(self, encoder: Encoder, pooling: Pooling, device: torch.device) -> None:
        self.most_tokens = _ENCODER_TOKENS[device.type]
        self._encoder = encoder
        self._pooling = pooling
        self._device = device

    @torch.inference_mode()
    def embed(self, texts: Sequence[Sequence[int]]) -> list[bytes]:
        batch = Texts.of(texts, self._device)
        return _rows(batch.pooled(self._encoder(batch), self._pooling))

    def score(self, texts: Sequence[Sequence[int]], scored: Sequence[int]) -> list[float]:
        raise ModelUnsupported("an encoder gives no probabilities")


def encoder_embedder(
    checkpoint: EncoderCheckpoint, device: torch.device, pooling: Pooling | None = None
) -> EncoderEmbedder:
    """`pooling`: None: as its files say."""
    return EncoderEmbedder(load_encoder(checkpoint, device), pooling or checkpoint.pooling, device)


@dataclass
class _Blocks:
    """A cache of its own, as large as the largest batch was."""

    ops: Ops
    shape: KVShape
    layers: list[LayerKV]

    def at_least(self, num_blocks: int) -> list[LayerKV]:
        if num_blocks > self.shape.num_blocks:
            self.shape = replace(self.shape, num_blocks=num_blocks)
            self.layers = []  # freed before the larger one is made
            self.layers = self.ops.allocate_kv(self.shape)
        return self.layers


class DecoderEmbedder:
    """`most_tokens`: as in a step, so that a batch of texts holds nobody up for longer than a prompt does."""

    def __init__(self, model: CausalLM, ops: Ops, shape: KVShape, pooling: Pooling, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self._model = model
        self._ops = ops
        self._pooling = pooling
        self._blocks = _Blocks(ops, replace(shape, num_blocks=0), [])

    @torch.inference_mode()
    def embed(self, texts: Sequence[Sequence[int]]) -> list[bytes]:
        batch = Texts.of(texts, self._ops.device)
        rows = torch.arange(batch.token_ids.shape[0], device=self._ops.device)
        states = final_states(self._model, *self._step(batch, rows))
        return _rows(batch.pooled(states, self._pooling))

    @torch.inference_mode()
    def score(self, texts: Sequence[Sequence[int]], scored: Sequence[int]) -> list[float]:
        batch = Texts.of(texts, self._ops.device)
        ends = [start + length for start, length in zip(batch.starts, batch.lengths, strict=True)]
        told = torch.cat([torch.arange(end - count, end) for end, count in zip(ends, scored, strict=True)])
        told = told.to(self._ops.device)
        logits = self._model(*self._step(batch, told - 1)).float()  # what is before a token tells it
        own = logits.gather(1, batch.token_ids[told][:, None]).squeeze(1) - logits.logsumexp(dim=1)
        ends = list(accumulate(scored))
        return [float(own[end - count : end].mean()) for end, count in zip(ends, scored, strict=True)]

    def _step(self, texts: Texts, rows: Tensor) -> tuple[Batch, list[LayerKV]]:
        size, device = self._blocks.shape.block_size, self._ops.device
        needed = [-(-length // size) for length in texts.lengths]
        tables = torch.zeros(len(needed), max(needed), dtype=torch.int32)
        first = 0
        for table, count in zip(tables, needed, strict=True):
            table[:count] = torch.arange(first, first + count)
            first += count
        batch = Batch(
            token_ids=texts.token_ids.int(),
            positions=texts.positions.int(),
            query_starts=torch.tensor([*texts.starts, sum(texts.lengths)], dtype=torch.int32, device=device),
            context_lens=torch.tensor(texts.lengths, dtype=torch.int32, device=device),
            block_tables=tables.to(device),
            logit_rows=rows,
            num_decodes=sum(length == 1 for length in texts.lengths),
        )
        return batch, self._blocks.at_least(first)


def final_states(model: CausalLM, batch: Batch, kv: Sequence[LayerKV]) -> Tensor:
    """What the head would be given for the batch's logit rows: [rows, hidden] float32."""
    if not isinstance(model, Decoder):
        raise ModelUnsupported(f"no vectors can be made by models of the family '{model.config.architecture}'")
    model.ops.begin(batch)
    stream = Stream(model.embedding(batch.token_ids))
    model.ops.run_layers(model.layers, stream, kv, batch)
    x, norm = _whole(stream.at(batch.logit_rows)).float(), model.norm
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + norm.eps) * norm.weight.float()


def _whole(stream: Stream) -> Tensor:
    pending = stream.pending
    if pending is None:
        return stream.residual
    if isinstance(pending, Scaled):
        return stream.residual + pending.values * pending.row_scales[:, None] * pending.column_scales
    return stream.residual + pending


def _rows(vectors: Tensor) -> list[bytes]:
    return [row.tobytes() for row in vectors.cpu().numpy()]
