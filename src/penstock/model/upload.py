"""Weights on their way from mapped files to a GPU, at the speed of the bus rather than of one core.

A copy from memory that is not pinned is made by one thread of the driver, a tenth as fast as the bus. All cores fill
one pinned buffer here, while the device reads another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_BUFFER_BYTES = 64 << 20
_NUM_BUFFERS = 3
_WORTHWHILE_BYTES = 1 << 20  # less is copied as it is


@dataclass
class _Buffer:
    bytes: Tensor
    read: torch.cuda.Event  # when the device has read what was put here last


class Upload:
    """CPU tensors copied to any device. A copy to a GPU is ordered before all that its current stream does next."""

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []
        self._next = 0

    def __call__(self, source: Tensor, device: torch.device) -> Tensor:
        if device.type != "cuda" or source.nbytes < _WORTHWHILE_BYTES:
            return source.to(device, copy=True)
        made = torch.empty(source.shape, dtype=source.dtype, device=device)
        target, left = made.view(-1).view(torch.uint8), source.reshape(-1).view(torch.uint8)
        for begin in range(0, left.nbytes, _BUFFER_BYTES):
            part, buffer = left[begin : begin + _BUFFER_BYTES], self._buffer()
            staged = buffer.bytes[: part.nbytes]
            staged.copy_(part)
            target[begin : begin + part.nbytes].copy_(staged, non_blocking=True)
            buffer.read.record()
        return made

    def release(self) -> None:
        """Give the buffers back; more uploads take new ones."""
        for buffer in self._buffers:
            buffer.read.synchronize()
        self._buffers, self._next = [], 0

    def _buffer(self) -> _Buffer:
        """The one that was filled longest ago, when the device has read it."""
        if len(self._buffers) < _NUM_BUFFERS:
            staging = torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
            self._buffers.append(_Buffer(staging, torch.cuda.Event()))  # type: ignore[no-untyped-call]
            return self._buffers[-1]
        found = self._buffers[self._next]
        self._next = (self._next + 1) % _NUM_BUFFERS
        found.read.synchronize()
        return found
