"""Random models on each kind of runner, for tests that hold them all to the same rule."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import msgspec
import pytest

from penstock.core.model_config import ModelConfig
from penstock.core.settings import EngineSettings
from penstock.model.random_weights import RandomCheckpoint
from penstock.runner.assemble import Assembly
from penstock.runner.ranks.assemble import assemble_ranks
from penstock.runner.ranks.join import SHARE_VARIABLE
from penstock.runner.ranks.led import LedMemory
from penstock.runner.step_inputs import StepInputs, decode_choices, encode_choices
from penstock.runner.verify import choices
from penstock.sched.plan import Runner, Slice, StepHandle, StepPlan, StepResult
from tests.equality.inprocess import soiled
from tests.template import forked

# Blocks of ranks on a GPU: more than any test hands out. Several engines start on it at once, and one that measures
# how much of it is free may find anything.
GPU_RANK_BLOCKS = 1024


def through_bytes(runner: Any) -> Runner:
    """The runner, with everything that a step needs sent through bytes, as to another rank: the inputs of the model,
    and, once it is known, how each token is chosen."""
    prepare, choose = runner.prepare, runner.choose
    runner.prepare = lambda plan: StepInputs.decode(prepare(plan).encode())
    runner.choose = lambda logits, specs, *rest: choose(logits, decode_choices(encode_choices(specs)), *rest)
    return runner


class Overlapped:
    """A runner that is done when `submit` returns, in the part of one that is not: it is given steps whose newest
    tokens the host has not read. So overlapped steps are tried where there is no GPU."""

    overlaps = True

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._newest: dict[str, int] = {}

    def submit(self, plan: StepPlan) -> StepHandle:
        step = _Put(self, msgspec.structs.replace(plan, slices=[self._completed(s) for s in plan.slices]))
        if all(spec.mask is None for spec in choices(plan.slices)):
            step.choose()
        return step

    def run(self, plan: StepPlan) -> StepHandle:
        handle = self._runner.submit(plan)
        sampled = zip(plan.slices, handle.result().sampled, strict=True)
        self._newest = {s.request_id: tokens.token_ids[-1] for s, tokens in sampled if tokens is not None}
        return handle

    def _completed(self, planned: Slice) -> Slice:
        """Returns the slice with its newest token and as it is now: it may be run when more is planned already."""
        newest = [self._newest[planned.request_id]] if planned.awaits_token else []
        return msgspec.structs.replace(
            planned, token_ids=[*planned.token_ids, *newest], block_ids=list(planned.block_ids)
        )


class _Put:
    """A step that is put off until its tokens are to be chosen: masks may depend on the step before."""

    def __init__(self, runner: Overlapped, plan: StepPlan) -> None:
        self._runner, self._plan = runner, plan
        self._done: StepHandle | None = None

    def choose(self) -> None:
        if self._done is None:
            self._done = self._runner.run(self._plan)

    def result(self) -> StepResult:
        assert self._done is not None, "its tokens were never chosen"
        return self._done.result()


def end_ranks(assembly: Assembly) -> None:
    """The other ranks of an assembly that nobody will use again. They take memory: a process each."""
    assert isinstance(assembly.memory, LedMemory)
    assembly.memory._leader.close()


@cache
def assembled(
    config: ModelConfig,
    device: str,
    *,
    block_size: int,
    max_num_seqs: int = 16,
    chunk_tokens: int = 96,
    host_kv_gib: float | None = None,
    max_loras: int | None = None,
    speculate: Literal["off", "ngram", "draft"] = "off",
    draft_seed: int = 0,
    max_image_tokens: int | None = None,
) -> Assembly:
    """Assembles an engine on "cpu", "cpu-overlapped" or "cuda", in float32, with a cache full of numbers that show when
    they are read. Every plan goes to the overlapped runner through bytes. "cpu tp=2", "cpu tp=2 pp=2" and the like are
    several ranks, processes of their own; on a GPU they share it, with other engines too."""
    kind, *sizes = device.split()
    ranks = {name: int(size) if size.isdecimal() else size for name, size in (each.split("=") for each in sizes)}
    settings = EngineSettings(
        device="cuda" if kind == "cuda" else "cpu",
        dtype="float32",
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        chunk_tokens=chunk_tokens,
        host_kv_gib=host_kv_gib,
        max_loras=max_loras,
        max_image_tokens=max_image_tokens,
        memory_fraction=0.02 if kind == "cuda" and not ranks else None,  # engines of a whole module are kept
        threads=1 if ranks else None,
        **ranks,  # type: ignore[arg-type]
        speculate=speculate,
        draft="the same, or one of other weights" if speculate == "draft" else None,
    )
    draft = RandomCheckpoint(config, draft_seed) if speculate == "draft" else None
    max_blocks = GPU_RANK_BLOCKS if kind == "cuda" and ranks else None
    with pytest.MonkeyPatch.context() as patched, forked() if ranks else contextlib.nullcontext():
        patched.setenv(SHARE_VARIABLE, "1")
        made = assemble_ranks(RandomCheckpoint(config), config, settings, lambda *_: None, draft, max_blocks=max_blocks)
    soiled(made.rank_runner._kv)  # type: ignore[attr-defined]
    if device != "cpu-overlapped":
        return made
    draft_runner = Overlapped(through_bytes(made.draft.runner)) if made.draft is not None else None
    overlapped = replace(made.draft, runner=draft_runner) if made.draft is not None else None
    return replace(made, runner=Overlapped(through_bytes(made.runner)), draft=overlapped)
