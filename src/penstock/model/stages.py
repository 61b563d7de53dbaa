"""Pipeline stages: which layers a rank has, and how the residual stream gets from one stage to the next."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from torch import Tensor

from penstock.core.errors import ModelUnsupported
from penstock.core.model_config import ModelConfig

_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


class Link(Protocol):
    """A way to the stage before or after. Streams come in the order in which they were sent."""

    def send(self, x: Tensor) -> None: ...

    def receive(self, num_rows: int) -> Tensor:
        """[rows, hidden]"""


@dataclass(frozen=True)
class Stage:
    """A rank's place in the pipeline. Alone it is first and last, and has all layers."""

    layers: range | None = None  # None: all
    before: Link | None = None  # None: it is the first, and embeds tokens
    after: Link | None = None  # None: it is the last, and makes logits

    def of(self, num_layers: int) -> range:
        return range(num_layers) if self.layers is None else self.layers

    def is_elsewhere(self, name: str, num_layers: int) -> bool:
        """Whether a linear of this name belongs to a layer of another stage."""
        found = _LAYER.match(name)
        return found is not None and int(found[1]) in range(num_layers) and int(found[1]) not in self.of(num_layers)

    @property
    def is_alone(self) -> bool:
        return self.before is None and self.after is None

    def stream_of(self, x: Tensor) -> Tensor:
        """The stream of tokens x [tokens], as the stage before has made it."""
        assert self.before is not None
        return self.before.receive(len(x))


def stage_layers(config: ModelConfig, count: int) -> list[range]:
    """Layers of each of so many stages, so that the one with the most to read has as little as can be. The head counts
    with the last stage's layers: it is as large as several of them."""
    if count > config.num_layers:
        raise ModelUnsupported(f"{count} pipeline stages, but the model has {config.num_layers} layers")
    head = config.vocab_size * config.hidden_size / _layer_weights(config)  # in layers
    sizes = min(_partitions(config.num_layers, count), key=lambda sizes: _longest(sizes, head))
    return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _longest(sizes: Sequence[int], head: float) -> tuple[float, int]:
    costs = [*sizes[:-1], sizes[-1] + head]
    return max(costs), -sizes[-1]  # of equals, the one that leaves the first stage most time for the scheduler


def _partitions(total: int, count: int) -> list[list[int]]:
    """Even ones, but that the last stage may have any number fewer."""
    found = []
    for last in range(1, total - count + 2):
        rest = total - last
        each, more = divmod(rest, count - 1) if count > 1 else (0, 0)
        if count == 1 and rest:
            continue
        found.append([each + (place >= count - 1 - more) for place in range(count - 1)] + [last])
    return found


def _layer_weights(config: ModelConfig) -> float:
    heads = config.num_heads + config.num_kv_heads
    ffn = 3 * config.intermediate_size
    if config.experts is not None:
        experts = config.experts
        ffn = 3 * (experts.per_token * experts.intermediate_size + experts.shared_intermediate_size)
    attention: float = 2 * heads * config.head_dim
    if config.latent is not None:
        attention = config.latent.parameters(config.hidden_size, config.num_heads) / config.hidden_size
    return config.hidden_size * (attention + ffn)
