"""Recurrent states of sequences, by slot: how large a rank's part of them is, and where they lie. The cache
(`kv.states`) owns the slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.core.model_config import STATE_VALUE_BYTES, ModelConfig
from penstock.model.batch import LayerState
from penstock.model.ops import Zeros
from penstock.model.ops.memory import pages
from penstock.model.shard import Axis, Shard
from penstock.model.stages import Stage


@dataclass(frozen=True)
class StateShape:
    num_layers: int  # linear ones, of this rank's stage
    conv: tuple[int, int]  # how many tokens are kept, and of how many channels
    recurrent: tuple[int, int, int]  # heads, key_dim, value_dim

    @property
    def slot_bytes(self) -> int:
        """Memory of one sequence's state in all layers."""
        conv, recurrent = self.conv[0] * self.conv[1], self.recurrent[0] * self.recurrent[1] * self.recurrent[2]
        return self.num_layers * (conv + recurrent) * STATE_VALUE_BYTES

    def allocate(self, num_slots: int, device: torch.device, zeros: Zeros | None = None) -> list[LayerState]:
        """`num_slots`: of sequences and snapshots; slot 0 comes beside them, for padding. `zeros`: where a device's
        memory comes from; None: from torch, or where the system gives it page by page."""

        def made(*size: int) -> Tensor:
            whole = num_slots + 1, *size
            if zeros is not None:
                return zeros(whole, dtype=torch.float32, device=device)
            if device.type == "cpu":
                count = torch.Size(whole).numel()
                return pages(count * STATE_VALUE_BYTES).view(torch.float32).view(whole)
            return torch.zeros(whole, dtype=torch.float32, device=device)

        return [LayerState(made(*self.conv), made(*self.recurrent)) for _ in range(self.num_layers)]


def copy_states(states: Sequence[LayerState], copies: Sequence[tuple[int, int]]) -> None:
    """Copy whole slots, (source, destination), in every layer and in this order."""
    for source, destination in copies:
        for layer in states:
            for part in (layer.conv, layer.recurrent):
                part[destination].copy_(part[source])


def state_shape(config: ModelConfig, shard: Shard, stage: Stage) -> StateShape | None:
    """None: the model has no recurrent state."""
    linear = config.linear
    if linear is None:
        return None
    heads = shard.num_units(Axis(linear.num_key_heads), "linear attention")
    served = linear.num_value_heads // linear.num_key_heads
    channels = heads * (2 * linear.key_dim + served * linear.value_dim)
    num_layers = sum(config.is_linear(layer) for layer in stage.of(config.num_layers))
    return StateShape(
        num_layers, (linear.kernel_size - 1, channels), (heads * served, linear.key_dim, linear.value_dim)
    )
