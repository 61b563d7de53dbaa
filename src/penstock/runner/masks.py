"""Guides' masks on rows of logits: all other tokens become impossible, in one operation for all rows with a mask."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.sched.plan import SampleSpec


def apply_masks(logits: Tensor, specs: list[SampleSpec]) -> None:
    """Masks rows in place. Waits for masks that are still being made: the device has something to do meanwhile."""
    masked = [(row, spec.mask.bits()) for row, spec in enumerate(specs) if spec.mask is not None]
    if not masked:
        return
    packed = np.frombuffer(b"".join([bits for _, bits in masked]), np.uint8).reshape(len(masked), -1)
    barred = _barred(packed, logits)
    if len(masked) == len(specs):
        logits.masked_fill_(barred, -torch.inf)
    else:
        rows = _sent(torch.tensor([row for row, _ in masked]), logits.device)
        logits[rows] = logits[rows].masked_fill_(barred, -torch.inf)


def _barred(packed: np.ndarray[tuple[int, int], np.dtype[np.uint8]], logits: Tensor) -> Tensor:
    """[rows, bytes] bits to [rows, vocabulary]: what may not come."""
    count = logits.shape[1]
    if logits.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed, axis=1, count=count, bitorder="little") == 0)
    bits = _sent(torch.from_numpy(packed.copy()), logits.device)[:, :, None] >> torch.arange(
        8, dtype=torch.uint8, device=logits.device
    )  # [rows, bytes, 8]
    return (bits & 1).flatten(1)[:, :count] == 0


def _sent(values: Tensor, device: torch.device) -> Tensor:
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)
