"""An engine over as many ranks as its settings say: this process leads, others are started for the rest."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from penstock.core.cores import usable_cores
from penstock.core.model_config import ModelConfig
from penstock.core.nodes import nodes_of, spread
from penstock.core.parallelism import parallelism_of
from penstock.core.settings import EngineSettings
from penstock.hub.checkpoint import Checkpoint
from penstock.runner.assemble import Assembly, assemble
from penstock.runner.load import Phase
from penstock.runner.ranks.identity import group_identity
from penstock.runner.ranks.leader import OnLost, OnReading, start_followers
from penstock.runner.ranks.led import led
from penstock.runner.ranks.reading import usage_of


def assemble_ranks(
    checkpoint: Checkpoint,
    model: str | ModelConfig,
    settings: EngineSettings,
    phase: Phase,
    draft: Checkpoint | None = None,
    on_lost: OnLost = lambda lost: None,
    on_reading: OnReading = lambda reading: None,
    max_blocks: int | None = None,
) -> Assembly:
    """`model`: what the other ranks load, by its name, or random weights of this shape. `on_lost`: called in a thread
    when one of them is gone; `on_reading`: likewise, when one has said how it stands. `max_blocks`: see `assemble`; all
    ranks have as many blocks as this one, at most."""
    parallelism = parallelism_of(settings, checkpoint.config)
    nodes = nodes_of(settings, {})  # variables are the server's affair
    if parallelism.num_ranks == nodes.count == 1:
        return assemble(checkpoint, settings, phase, draft, max_blocks=max_blocks)
    identity = group_identity(checkpoint, settings, parallelism, nodes)
    num_here = spread(parallelism, nodes.count).sizes[0]
    here = replace(settings, threads=settings.threads or max(1, usable_cores() // num_here))
    leader = start_followers(model, checkpoint.config, here, identity, nodes)
    assembly = assemble(checkpoint, here, phase, draft, leader, max_blocks)
    other_gpus, other_caches = leader.started()
    leader.watch(on_lost, on_reading, partial(usage_of, assembly, leader.device, leader.ranks))
    return replace(led(assembly, leader, parallelism), other_gpus=other_gpus, other_caches=other_caches)
