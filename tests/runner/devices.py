"""Random models on each kind of runner, for tests that hold them all to the same rule."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import msgspec
import pytest
import torch

from penstock.core.model_config import ModelConfig
from penstock.core.settings import EngineSettings
from penstock.model.random_weights import RandomCheckpoint
from penstock.runner.assemble import Assembly, assemble
from penstock.sched.plan import Runner, Slice, StepHandle, StepPlan
from tests.equality.inprocess import soiled

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Overlapped:
    """A runner that is done when `submit` returns, in the part of one that is not: it is given steps whose newest
    tokens the host has not read. So overlapped steps are tried where there is no GPU."""

    overlaps = True

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._newest: dict[str, int] = {}

    def submit(self, plan: StepPlan) -> StepHandle:
        handle = self._runner.submit(msgspec.structs.replace(plan, slices=[self._completed(s) for s in plan.slices]))
        sampled = zip(plan.slices, handle.result().sampled, strict=True)
        self._newest = {s.request_id: tokens.token_ids[-1] for s, tokens in sampled if tokens is not None}
        return handle

    def _completed(self, planned: Slice) -> Slice:
        if not planned.awaits_token:
            return planned
        return msgspec.structs.replace(planned, token_ids=[*planned.token_ids, self._newest[planned.request_id]])


@cache
def assembled(
    config: ModelConfig, device: str, *, block_size: int, max_num_seqs: int = 16, chunk_tokens: int = 96
) -> Assembly:
    """On "cpu", "cpu-overlapped" or "cuda", in float32, with a cache full of numbers that show when they are read."""
    settings = EngineSettings(
        device="cuda" if device == "cuda" else "cpu",
        dtype="float32",
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        chunk_tokens=chunk_tokens,
        memory_fraction=0.05 if device == "cuda" else None,
    )
    made = assemble(RandomCheckpoint(config), settings, lambda *_: None)
    soiled(made.runner._kv)  # type: ignore[attr-defined]
    return replace(made, runner=Overlapped(made.runner)) if device == "cpu-overlapped" else made
