"""From settings and a checkpoint to a runner: which device, which kernels, which number formats, how many blocks.

Every "auto" is resolved on the way, once; what it came to is in `Assembly`, for whoever prints it.
"""

from __future__ import annotations

import torch

from penstock.core.settings import EngineSettings
from penstock.hub.checkpoint import Checkpoint
from penstock.runner.assembly import Assembly
from penstock.runner.build import build
from penstock.runner.load import Phase, load
from penstock.runner.size import rehearsal_note, size

__all__ = ["Assembly", "assemble"]


def assemble(
    checkpoint: Checkpoint, settings: EngineSettings, phase: Phase, draft: Checkpoint | None = None
) -> Assembly:
    """`draft`: of a small model, to guess with."""
    loaded = load(checkpoint, settings, phase, draft)
    engine_size = size(loaded, settings, phase)
    try:
        return build(loaded, engine_size, phase)
    except torch.OutOfMemoryError:
        rehearsal_note(loaded, settings).forget()  # it takes more than was noted: the next start measures again
        raise
