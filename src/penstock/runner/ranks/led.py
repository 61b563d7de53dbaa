"""Adapters, embedder and memory of an engine on all ranks at once: the leader's own, told to the followers first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.core.parallelism import Parallelism
from penstock.core.parking import MemoryChange
from penstock.model.lora import HostAdapter
from penstock.runner.assembly import Adapters, Assembly, Embedder, Memory
from penstock.runner.ranks.leader import Leader
from penstock.runner.ranks.messages import (
    ClearSlot,
    EmbedTexts,
    ForgetAdapter,
    KeepAdapter,
    ParkMemory,
    ReadAdapter,
    ScoreTexts,
    WakeMemory,
)
from penstock.runner.ranks.pipeline import PipelineRunner
from penstock.sched.plan import Runner


def led(assembly: Assembly, leader: Leader, parallelism: Parallelism) -> Assembly:
    """An assembly whose parts act on all ranks."""
    adapters, embedder, memory = assembly.adapters, assembly.embedder, assembly.memory
    runner: Runner = assembly.runner
    if parallelism.pp > 1:
        runner, embedder = (
            PipelineRunner(assembly.rank_runner, leader),
            None,
        )  # states of all layers are at no one stage
    else:
        assembly.rank_runner.lead(leader.run)
    return replace(
        assembly,
        runner=runner,
        parallelism=parallelism,
        adapters=LedAdapters(adapters, leader) if adapters is not None else None,
        embedder=LedEmbedder(embedder, leader) if embedder is not None else None,
        memory=LedMemory(memory, leader) if memory is not None else None,
    )


class LedAdapters:
    def __init__(self, own: Adapters, leader: Leader) -> None:
        self.num_slots = own.num_slots
        self._own = own
        self._leader = leader

    def read(self, path: str, digest: str) -> HostAdapter:
        self._leader.tell(ReadAdapter(path, digest))
        return self._own.read(path, digest)

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
    def __init__(self, own: Embedder, leader: Leader) -> None:
        self.most_tokens = own.most_tokens
        self._own = own
        self._leader = leader

    def embed(self, texts: Sequence[Sequence[int]]) -> list[bytes]:
        self._leader.tell(EmbedTexts([list(text) for text in texts]))
        return self._own.embed(texts)

    def score(self, texts: Sequence[Sequence[int]], scored: Sequence[int]) -> list[float]:
        self._leader.tell(ScoreTexts([list(text) for text in texts], list(scored)))
        return self._own.score(texts, scored)


class LedMemory:
    def __init__(self, own: Memory, leader: Leader) -> None:
        self._own = own
        self._leader = leader

    def park(self) -> MemoryChange:
        self._leader.tell(ParkMemory())
        return self._own.park()

    def wake(self) -> MemoryChange:
        self._leader.tell(WakeMemory())
        return self._own.wake()
