"""How much a rank has taken: of memory, and of time in collectives. Read a few times a minute, beside its steps."""

from __future__ import annotations

import torch

from penstock.model.ranks import Ranks
from penstock.runner.parking import resident_bytes


def taken(device: torch.device, ranks: Ranks) -> tuple[int, float | None]:
    """Bytes, and seconds. Kernels on a GPU meet without the host: nobody measures there how long they wait."""
    memory_bytes = torch.cuda.memory_reserved(device) if device.type == "cuda" else resident_bytes()
    return memory_bytes, getattr(ranks, "communication_s", None)
