"""Adapters, embedder and memory of an engine on all ranks at once: the leader's own, told to the followers first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.core.expert_load import ExpertLoad
from penstock.core.expert_placement import ExpertPlacement
from penstock.core.parallelism import Parallelism
from penstock.core.parking import MemoryChange
from penstock.model.lora import HostAdapter
from penstock.runner.assembly import Adapters, Assembly, Embedder, Experts, Memory
from penstock.runner.ranks.leader import Leader
from penstock.runner.ranks.messages import (
    ClearSlot,
    EmbedTexts,
    ForgetAdapter,
    KeepAdapter,
    ParkMemory,
    PlaceExperts,
    ReadAdapter,
    ScoreTexts,
    WakeMemory,
)
from penstock.runner.ranks.pipeline import PipelineRunner
from penstock.runner.runner import in_step
from penstock.sched.plan import Runner


def led(assembly: Assembly, leader: Leader, parallelism: Parallelism) -> Assembly:
    """An assembly whose parts act on all ranks."""
    adapters, embedder, memory = assembly.adapters, assembly.embedder, assembly.memory
    runner: Runner = assembly.runner
    is_pipeline = parallelism.pp > 1
    if is_pipeline:
        runner = PipelineRunner(assembly.rank_runner, leader)
    else:
        assembly.rank_runner.lead(leader.run)
    return replace(
        assembly,
        runner=runner,
        parallelism=parallelism,
        adapters=LedAdapters(adapters, leader) if adapters is not None else None,
        embedder=LedEmbedder(embedder, leader, is_pipeline=is_pipeline) if embedder is not None else None,
        memory=LedMemory(memory, leader) if memory is not None else None,
        experts=LedExperts(assembly.experts, leader) if assembly.experts is not None else None,
    )


class LedAdapters:
    def __init__(self, own: Adapters, leader: Leader) -> None:
        self.num_slots = own.num_slots
        self._own = own
        self._leader = leader

    def read(self, path: str, digest: str) -> HostAdapter:
        """Every rank reads its part of the adapter. If one cannot, none of them keeps it."""
        self._leader.tell(ReadAdapter(path, digest))
        own: HostAdapter | Exception
        try:
            own = self._own.read(path, digest)
        except Exception as error:
            own = error
        errors = self._leader.adapter_errors()
        if isinstance(own, HostAdapter) and not errors:
            return own
        self._leader.tell(ForgetAdapter(digest))
        raise own if isinstance(own, Exception) else errors[0]

    def keep(self, adapter: HostAdapter) -> None:
        self._leader.tell(KeepAdapter(adapter.digest))
        self._own.keep(adapter)

    def forget(self, digest: str) -> None:
        self._leader.tell(ForgetAdapter(digest))
        self._own.forget(digest)

    def clear(self, slot: int) -> None:
        self._leader.tell(ClearSlot(slot))
        self._own.clear(slot)


class LedEmbedder:
    def __init__(self, own: Embedder, leader: Leader, *, is_pipeline: bool) -> None:
        """`is_pipeline`: vectors and scores are made by the last stage."""
        self.most_tokens = own.most_tokens
        self._own = own
        self._leader = leader
        self._is_pipeline = is_pipeline

    @property
    def num_parts(self) -> int:
        return self._own.num_parts

    def embed(self, texts: Sequence[Sequence[int]]) -> list[bytes]:
        self._leader.tell(EmbedTexts([list(text) for text in texts]))
        with in_step(self._leader.run):
            own = self._own.embed(texts)
        return self._leader.vectors() if self._is_pipeline else own

    def score(self, texts: Sequence[Sequence[int]], scored: Sequence[int]) -> list[float]:
        self._leader.tell(ScoreTexts([list(text) for text in texts], list(scored)))
        with in_step(self._leader.run):
            own = self._own.score(texts, scored)
        return self._leader.scores() if self._is_pipeline else own

    def token_logprobs(self, texts: Sequence[Sequence[int]], num_top: int) -> list[bytes]:
        self._leader.tell(EmbedTexts([list(text) for text in texts], num_top))
        with in_step(self._leader.run):
            own = self._own.token_logprobs(texts, num_top)
        return self._leader.vectors() if self._is_pipeline else own


class LedExperts:
    def __init__(self, own: Experts, leader: Leader) -> None:
        self.redundant = own.redundant
        self._own = own
        self._leader = leader

    def load(self) -> ExpertLoad:
        """Layers of other stages are as old as those ranks' last sign of life."""
        layers = {**self._own.load().layers, **self._leader.expert_loads}
        return ExpertLoad(dict(sorted(layers.items())))

    def place(self, layer: int, placement: ExpertPlacement) -> None:
        self._leader.tell(PlaceExperts(layer, [list(experts) for experts in placement.ranks]))
        self._own.place(layer, placement)


class LedMemory:
    def __init__(self, own: Memory, leader: Leader) -> None:
        self._own = own
        self._leader = leader

    def park(self) -> MemoryChange:
        self._leader.release_caches()
        self._leader.tell(ParkMemory())
        return self._own.park()

    def wake(self) -> MemoryChange:
        self._leader.tell(WakeMemory())
        change = self._own.wake()
        self._leader.reach_caches()
        return change
