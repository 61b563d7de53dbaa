"""Readings of a rank: memory, and time of its steps. Read a few times a minute, beside the steps."""

from __future__ import annotations

import torch

from penstock.core.ranks import RankUsage
from penstock.model.ranks import Ranks
from penstock.runner.assembly import Assembly
from penstock.runner.parking import resident_bytes


def usage_of(assembly: Assembly, device: torch.device, ranks: Ranks) -> RankUsage:
    meter = assembly.rank_runner.meter
    return RankUsage(
        torch.cuda.memory_reserved(device) if device.type == "cuda" else resident_bytes(),
        meter.communication_s,
        getattr(ranks, "is_estimated", False),
        meter.busy_s,
        meter.num_steps,
        assembly.device.uuid,
    )
