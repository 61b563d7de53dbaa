"""A rank's experts while an engine runs: counts are read now and then, beside the steps, and placements are changed
between them. It knows no other rank: `ranks.led` tells those.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.core.expert_load import ExpertLoad, LayerLoad
from penstock.core.expert_placement import ExpertPlacement
from penstock.model.expert_layers import ExpertLayers

_expert_load_decoder = msgspec.json.Decoder(ExpertLoad)


class RankExperts:
    """Any thread may ask for the load; the one that runs steps moves experts."""

    def __init__(self, layers: ExpertLayers, on_moved: Callable[[], None] = lambda: None) -> None:
        """`on_moved`: called when weights have changed. Tokens counted before, by rehearsals, are forgotten."""
        self._layers = layers
        self._on_moved = on_moved
        self._lock = threading.Lock()
        self._counter = _Counter(layers.counts)
        self._began = self._settled = self._counter.read()
        num_ranks = layers.shard.size if layers.sharing is not None else 0
        self._rank_tokens = {layer: [0] * num_ranks for layer in layers.counted}  # as of `_settled`

    @property
    def redundant(self) -> int | None:
        """Slots of each rank beyond its share; None: whole experts are not shared out, and none can be moved."""
        return self._layers.sharing.redundant if self._layers.sharing is not None else None

    def load(self) -> ExpertLoad:
        """The layers of this rank's stage."""
        with self._lock:
            now = self._counter.read()
            counts = (now - self._began).sum(dim=2)
            return ExpertLoad(
                {
                    layer: LayerLoad(counts[layer].tolist(), self._ranks(layer), self._by_rank(layer, now))
                    for layer in sorted(self._layers.counted)
                }
            )

    def place(self, layer: int, placement: ExpertPlacement) -> None:
        """Other experts on the ranks, from the next step on; of a layer of another stage it is none of its business."""
        if layer not in self._layers.layers:
            return
        with self._lock:
            self._counter.wait()
            now = self._counter.read()
            self._rank_tokens = {each: self._by_rank(each, now) for each in self._layers.counted}
            self._settled = now
            self._layers.layers[layer].place(placement)
            self._on_moved()

    def _ranks(self, layer: int) -> list[list[int]]:
        placement = self._layers.placement(layer)
        return [list(experts) for experts in placement.ranks] if placement is not None else []

    def _by_rank(self, layer: int, now: Tensor) -> list[int]:
        tokens, placement = list(self._rank_tokens[layer]), self._layers.placement(layer)
        if placement is not None:
            new = (now[layer] - self._settled[layer]).tolist()
            for expert, copies in placement.copies.items():
                for place, (rank, _) in enumerate(copies):
                    tokens[rank] += new[expert][place]
        return tokens


def read_expert_counts(path: str) -> dict[int, list[int]]:
    """Counts by layer, of a file that was recorded from a running engine."""
    try:
        load = _expert_load_decoder.decode(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"expert_counts: {path} cannot be read: {error.strerror}", param="expert_counts") from None
    except msgspec.MsgspecError as error:
        why = f"expert_counts: {path} is no record of GET /v1/penstock/experts: {error}"
        raise ConfigError(why, param="expert_counts") from None
    if not load.num_tokens:
        raise ConfigError(f"expert_counts: {path} has no tokens; record it under load", param="expert_counts")
    return {layer: found.counts for layer, found in load.layers.items()}


class _Counter:
    """Counts on a device, read without waiting for its steps."""

    def __init__(self, counts: Tensor) -> None:
        self._counts = counts
        self._stream: torch.cuda.Stream | None = None
        self._host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=counts.is_cuda)
        if counts.is_cuda:
            self._stream = torch.cuda.Stream(counts.device)  # type: ignore[no-untyped-call]
            self.wait()

    def read(self) -> Tensor:
        """Counts so far, read on a GPU by a stream of its own: whole numbers, as new as the kernels that made them."""
        if self._stream is None:
            return self._counts.clone()
        with torch.cuda.device(self._counts.device), torch.cuda.stream(self._stream):
            self._host.copy_(self._counts, non_blocking=True)
        self._stream.synchronize()
        return self._host.clone()

    def wait(self) -> None:
        """Waits until all steps that were launched are counted."""
        if self._counts.is_cuda:
            torch.cuda.synchronize(self._counts.device)
