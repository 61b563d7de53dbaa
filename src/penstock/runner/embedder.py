"""Vectors and scores of whole texts: by an encoder, or by a decoder that generates as well.

A decoder computes its texts at once in blocks of its own, apart from the cache of those who generate: every state of
every token is needed here, and a cached prefix has none. States are pooled where they are made, a piece at a time: what
leaves the device is a vector per text, or a number per scored token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import ModelUnsupported
from penstock.hub.encoder import EncoderCheckpoint, Pooling
from penstock.model.batch import Batch
from penstock.model.encoder import Encoder, load_encoder
from penstock.model.layers import CausalLM, Decoder
from penstock.model.ops import KVShape, LayerKV, Ops, Stream
from penstock.model.texts import Ints, Texts

T = TypeVar("T")

_ENCODER_TOKENS = {"cpu": 4096, "cuda": 65536}  # in a batch: more is not faster, and others wait longer
_ROOM = 4  # times the tokens of a batch, in blocks: every text begins one, and most are short
_STATES = 1024  # rows that are normed at once
_LOGITS = 64  # rows that have logits at once


class EncoderEmbedder:
    def __init__(self, encoder: Encoder, pooling: Pooling, device: torch.device) -> None:
        self.most_tokens = _ENCODER_TOKENS[device.type]
        self._encoder = encoder
        self._pooling = pooling
        self._device = device

    @torch.inference_mode()
    def embed(self, texts: Sequence[Sequence[int]]) -> list[bytes]:
        batch = Texts.of(texts, self._device)
        return _as_bytes(batch.pooled([self._encoder(batch)], self._pooling))

    def score(self, texts: Sequence[Sequence[int]], scored: Sequence[int]) -> list[float]:
        raise ModelUnsupported("an encoder gives no probabilities")

    def token_logprobs(self, texts: Sequence[Sequence[int]], num_top: int) -> list[bytes]:
        raise ModelUnsupported("an encoder gives no probabilities")


def encoder_embedder(
    checkpoint: EncoderCheckpoint,
    device: torch.device,
    pooling: Pooling | None = None,
    dtype: torch.dtype = torch.float32,
) -> EncoderEmbedder:
    """`pooling`: None: as its files say."""
    return EncoderEmbedder(load_encoder(checkpoint, device, dtype), pooling or checkpoint.pooling, device)


class _Blocks:
    """A cache of its own. One layer's cache serves them all on a GPU, one after another: nobody asks for it once the
    layer is done. The CPU's kernels know a layer by its cache; there it grows with the largest batch."""

    def __init__(self, ops: Ops, shape: KVShape, num_blocks: int) -> None:
        self.size = shape.table_block_size
        self._ops = ops
        self._shape = shape
        self.is_shared = ops.device.type == "cuda"
        self._num_blocks = num_blocks if self.is_shared else 0
        # Before the cache of those who generate takes what is left.
        self.layers = self._made(num_blocks) if self.is_shared else []

    def at_least(self, num_blocks: int) -> list[LayerKV]:
        if num_blocks <= self._num_blocks:
            return self.layers
        if self.is_shared:
            return self._made(num_blocks)  # for once: in the long run that memory is for other things
        self.layers, self._num_blocks = [], 0  # freed before the larger one is made
        self.layers, self._num_blocks = self._made(num_blocks), num_blocks
        return self.layers

    def release(self) -> None:
        """Frees the blocks of a CPU only: on a GPU they belong to others' memory too."""
        if not self.is_shared:
            self.layers, self._num_blocks = [], 0

    def _made(self, num_blocks: int) -> list[LayerKV]:
        shape = replace(self._shape, num_blocks=num_blocks)
        if not self.is_shared:
            return self._ops.allocate_kv(shape)
        return self._ops.allocate_kv(replace(shape, num_layers=1)) * shape.num_layers


class _Part(NamedTuple):
    """Tokens of a batch that are computed together: all of them, unless one text is longer than a step."""

    begin: int
    batch: Batch
    stream: Stream


class DecoderEmbedder:
    """`most_tokens`: tokens computed at once, as in a step, so that texts hold nobody up for longer than a prompt does.

    Each stage of a pipeline computes its layers and sends the streams on; the last one alone has something to return.
    """

    def __init__(self, model: CausalLM, ops: Ops, shape: KVShape, pooling: Pooling, most_tokens: int) -> None:
        assert isinstance(model, Decoder)
        self.most_tokens = most_tokens
        self.num_parts = 0  # of texts, that were computed so far: a sign that a long call goes on
        self._model = model
        self._ops = ops
        self._pooling = pooling
        self._most_blocks = -(-_ROOM * most_tokens // shape.table_block_size)
        self._blocks = _Blocks(ops, shape, self._most_blocks)

    @property
    def blocks(self) -> list[LayerKV]:
        """Blocks that it has of its own, on a GPU."""
        return self._blocks.layers

    def release(self) -> None:
        """Give back the memory that grows with the texts; it comes again with the next."""
        self._blocks.release()

    @torch.inference_mode()
    def embed(self, texts: Sequence[Sequence[int]]) -> list[bytes]:
        found: list[bytes] = []
        for few in self._at_once(texts, [len(text) for text in texts]):
            batch = Texts.of(few, self._ops.device)
            if parts := self._computed(batch):
                found += _as_bytes(batch.pooled(self._states(parts), self._pooling))
        return found

    @torch.inference_mode()
    def score(self, texts: Sequence[Sequence[int]], scored: Sequence[int]) -> list[float]:
        found: list[float] = []
        for few in self._at_once(list(zip(texts, scored, strict=True)), [len(text) for text in texts]):
            batch, counts = Texts.of([text for text, _ in few], self._ops.device), [count for _, count in few]
            if parts := self._computed(batch):
                told = self._log_probabilities(batch, parts, counts).cpu()
                found += [float(own.mean()) for own in torch.split(told, counts)]
        return found

    @torch.inference_mode()
    def token_logprobs(self, texts: Sequence[Sequence[int]], num_top: int) -> list[bytes]:
        """Log probabilities of each text but its first token, as `core.token_logprobs` has them."""
        found: list[bytes] = []
        for few in self._at_once(texts, [len(text) for text in texts]):
            batch, counts = Texts.of(few, self._ops.device), [len(text) - 1 for text in few]
            if parts := self._computed(batch):
                rows = [_token_rows(logits, told, num_top) for logits, told in self._logits(batch, parts, counts)]
                whole = torch.cat(rows).cpu() if rows else torch.empty((0, 2 + 2 * num_top), dtype=torch.int32)
                found += [own.numpy().tobytes() for own in torch.split(whole, counts)]
        return found

    def _at_once(self, items: Sequence[T], lengths: Sequence[int]) -> Iterator[Sequence[T]]:
        """Yields the items in runs, as many as there are blocks for; one text in any case."""
        begin, room = 0, self._most_blocks
        for number, length in enumerate(lengths):
            needed = -(-length // self._blocks.size)
            if needed > room and number > begin:
                yield items[begin:number]
                begin, room = number, self._most_blocks
            room -= needed
        yield items[begin:]

    def _computed(self, texts: Texts) -> list[_Part]:
        """Parts with all that the layers add to their streams, or none where another stage goes on with them."""
        model = self._model
        lengths = np.array(texts.lengths)
        needed = -(-lengths // self._blocks.size)
        kv = self._blocks.at_least(int(needed.sum()))
        ends = [*range(0, int(lengths.sum()), self.most_tokens), int(lengths.sum())]
        batches = [self._batch(texts, begin, end, _tables(needed)) for begin, end in pairwise(ends)]
        begun = (
            _Part(begin, batch, Stream(model.embedding(batch.token_ids)))
            for begin, batch in zip(ends, batches, strict=False)
        )
        kept = []
        for part in (self._by_layers if self._blocks.is_shared and len(batches) > 1 else self._by_parts)(begun, kv):
            if model.after is None:
                kept.append(part)
            else:
                model.after.send(part.stream.total())
        return kept

    def _by_parts(self, parts: Iterable[_Part], kv: Sequence[LayerKV]) -> Iterator[_Part]:
        """One part after another, in all layers: the next stage need not wait for the last of them."""
        for part in parts:
            self._ops.begin(part.batch)
            self._ops.run_layers(self._model.layers, part.stream, kv, part.batch)
            self.num_parts += 1
            yield part

    def _by_layers(self, parts: Iterable[_Part], kv: Sequence[LayerKV]) -> Iterator[_Part]:
        """One layer after another, in all parts: so one layer's cache is all that they need."""
        parts = list(parts)
        for layer, layer_kv in zip(self._model.layers, kv, strict=True):
            for part in parts:
                self._ops.begin(part.batch)
                layer(part.stream, layer_kv, part.batch)
                self.num_parts += 1
        yield from parts

    def _batch(self, texts: Texts, begin: int, end: int, tables: Ints) -> Batch:
        """Batch of the tokens [begin, end) of all texts."""
        device, starts = self._ops.device, np.array(texts.starts)
        stops = np.minimum(starts + texts.lengths, end)
        inside = (starts < end) & (stops > begin)
        counts = (stops - np.maximum(starts, begin))[inside]

        def ints(values: Ints) -> Tensor:
            return torch.from_numpy(values.astype(np.int32)).to(device)

        batch = Batch(
            token_ids=texts.token_ids[begin:end].int(),
            positions=texts.positions[begin:end].int(),
            query_starts=ints(np.array([0, *accumulate(counts)])),
            context_lens=ints((stops - starts)[inside]),
            block_tables=ints(tables[inside]),
            logit_rows=torch.empty(0, dtype=torch.int64, device=device),  # whoever wants some asks for them later
            num_decodes=int((counts == 1).sum()),
        )
        mrope = self._model.mrope
        return batch if mrope is None else replace(batch, angles=mrope(batch))

    def _states(self, parts: list[_Part]) -> Iterator[Tensor]:
        """Yields the head's inputs for all tokens in their order: [rows, hidden] at a time."""
        for _, batch, stream in parts:
            for rows in torch.split(torch.arange(batch.num_tokens, device=self._ops.device), _STATES):
                yield self._ops.normed(stream.at(rows), self._model.norm)

    def _log_probabilities(self, texts: Texts, parts: list[_Part], scored: Sequence[int]) -> Tensor:
        """Log probabilities of the last `scored` tokens of each text."""
        return torch.cat(
            [
                logits.gather(1, told[:, None]).squeeze(1) - logits.logsumexp(dim=1)
                for logits, told in self._logits(texts, parts, scored)
            ]
        )

    def _logits(self, texts: Texts, parts: list[_Part], scored: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits that tell so many of each one's last tokens, [rows, vocabulary] float32, and these; a few at a time,
        in the order of the tokens."""
        model = self._model
        ends = np.cumsum(texts.lengths)
        told = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, scored, strict=True)])
        rows = np.maximum(told - 1, 0)  # what is before a token tells it
        for begin, batch, stream in parts:
            inside = (rows >= begin) & (rows < begin + batch.num_tokens)
            own_rows, own_told = (torch.from_numpy(ids[inside]).to(self._ops.device) for ids in (rows - begin, told))
            for some, tokens in zip(*(torch.split(ids, _LOGITS) for ids in (own_rows, own_told)), strict=True):
                if not len(some):
                    continue
                yield model.logits(stream.at(some)).float(), texts.token_ids[tokens]


def _token_rows(logits: Tensor, told: Tensor, num_top: int) -> Tensor:
    own, total = logits.gather(1, told[:, None]), logits.logsumexp(dim=1, keepdim=True)
    ranks = (logits > own).sum(dim=1, keepdim=True) + 1
    values, ids = logits.topk(num_top, dim=1)
    floats = [(one - total).contiguous().view(torch.int32) for one in (own, values)]
    return torch.cat([floats[0], ranks.int(), ids.int(), floats[1]], dim=1)


def _tables(needed: Ints) -> Ints:
    """Blocks behind each other; rows are padded with 0."""
    places = np.arange(needed.max())
    return np.where(places < needed[:, None], (needed.cumsum() - needed)[:, None] + places, 0)


def _as_bytes(vectors: Tensor) -> list[bytes]:
    return [row.tobytes() for row in vectors.cpu().numpy()]
