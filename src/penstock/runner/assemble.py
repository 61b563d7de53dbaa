"""Assembly of a runner from settings and a checkpoint: which device, kernels and number formats, how many blocks.

Every "auto" is resolved on the way, once; the result is in `Assembly`, for callers that print it.
"""

from __future__ import annotations

from typing import Protocol

import torch

from penstock.core.settings import EngineSettings
from penstock.hub.checkpoint import Checkpoint
from penstock.model.ranks import Ranks
from penstock.model.stages import Stage
from penstock.runner.assembly import Assembly
from penstock.runner.build import build
from penstock.runner.load import Phase, load
from penstock.runner.size import EngineSize, rehearsal_note, size

__all__ = ["Assembly", "Group", "assemble"]


class Group(Protocol):
    """The ranks of a model, as one of them sees them while it is put together."""

    stage: Stage
    device: torch.device

    @property
    def ranks(self) -> Ranks: ...

    def agree(self, own: EngineSize, formats: str, placement: str = "") -> EngineSize:
        """The size that all have room for. `formats`: number formats in words, which are the same for all, as is
        `placement`, a digest of which ranks have which experts."""


def assemble(
    checkpoint: Checkpoint,
    settings: EngineSettings,
    phase: Phase,
    draft: Checkpoint | None = None,
    group: Group | None = None,
    max_blocks: int | None = None,
) -> Assembly:
    """`draft`: of a small model, to guess with. `group`: the ranks that share the model; None: there is one.
    `max_blocks`: of the KV cache, however many there is room for."""
    if group is None:
        loaded = load(checkpoint, settings, phase, draft)
    else:
        loaded = load(checkpoint, settings, phase, draft, group.ranks, group.stage, group.device)
    engine_size = size(loaded, settings, phase)
    if max_blocks is not None:
        engine_size = engine_size.with_blocks(min(max_blocks, engine_size.num_blocks))
    if group is not None:
        kernels = loaded.target.kernels
        formats = f"{kernels.number_format}, linear weights {kernels.quant}"
        experts = loaded.target.experts
        placement = experts.digest if experts is not None else ""
        engine_size = group.agree(engine_size, formats, placement)
    try:
        return build(loaded, engine_size, phase)
    except torch.OutOfMemoryError:
        if (note := rehearsal_note(loaded, settings)) is not None:
            note.forget()  # it takes more than was noted: the next start measures again
        raise
