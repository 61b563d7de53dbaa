"""Parallelism that an engine is started with: what its settings say, and for auto what `capacity` finds that fits."""

from __future__ import annotations

from dataclasses import replace

from penstock.capacity.smallest import Choice, choice_of, needs_of
from penstock.core.devices import VisibleGpus
from penstock.core.parallelism import Parallelism
from penstock.core.settings import EngineSettings
from penstock.hub.checkpoint import Checkpoint
from penstock.hub.groups import stored_groups
from penstock.observe.gpu.topology import visible_gpus


def with_parallelism(
    settings: EngineSettings, checkpoint: Checkpoint, draft: Checkpoint | None = None
) -> tuple[EngineSettings, Choice]:
    """Settings in which `tp`, `pp`, `ep` and `sp` say what was chosen. Settings of one rank are left as they are."""
    import torch

    visible, num_nodes = VisibleGpus(), settings.nnodes or 1
    if settings.device != "cpu" and torch.cuda.is_available() and torch.cuda.device_count() * num_nodes > 1:
        visible = visible_gpus(torch.cuda)
    asked = (settings.tp, settings.pp, settings.ep, settings.sp, settings.nnodes)
    if not visible.gpus and all(each in (None, 1) for each in asked):
        return settings, Choice(Parallelism())
    choice = choose_for(settings, checkpoint, visible, draft)
    if choice.parallelism.num_ranks == 1:
        return settings, choice
    chosen = choice.parallelism
    return replace(settings, tp=chosen.tp, pp=chosen.pp, ep=chosen.ep, sp=chosen.sp), choice


def choose_for(
    settings: EngineSettings, checkpoint: Checkpoint, visible: VisibleGpus, draft: Checkpoint | None = None
) -> Choice:
    needs = needs_of(
        settings,
        checkpoint.config,
        has_fp8=all(gpu.has_fp8 for gpu in visible.gpus),
        groups=stored_groups(checkpoint) if settings.load != "dummy" else None,
        draft=draft.config if draft is not None else None,
    )
    return choice_of(settings, needs, visible)
