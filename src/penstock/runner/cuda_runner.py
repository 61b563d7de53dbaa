"""The runner for a GPU: a step is launched and not waited for; the next may be launched before its tokens are read.

Sampled tokens stay on the device, where the next step picks them up; the host gets a copy when it asks. Steps of
decodes alone are CUDA graphs, one per batch size of a ladder; smaller batches are padded with sequences of no context.
A second graph of each size is for steps whose sequences share prefixes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.core.request import TokenLogprobs
from penstock.model.layers import CausalLM
from penstock.model.ops import LayerKV
from penstock.model.ops.triton import TritonOps
from penstock.model.ops.triton.argmax import argmax
from penstock.model.ops.triton.shared import pieces_wanted, sequences_per_tile
from penstock.runner.device_inputs import Inputs, Sizes, as_batch, write
from penstock.runner.device_sampler import choose, logprobs
from penstock.runner.moving import BlockMover
from penstock.runner.sharing import LEAST_MEMBERS, Room, SharedViews, share
from penstock.sched.plan import Sampled, SampleSpec, Slice, StepPlan, StepResult

_NUM_STAGES = 2  # a step's inputs may still be on their way when the next one's are written, but not those after it


Scores = list[Tensor | None]  # per sampled row, on the device: see device_sampler.logprobs


@dataclass
class PendingStep:
    """A step on the device. Asking for its result waits for it."""

    plan: StepPlan
    token_ids: Tensor  # pinned; valid once `done` has happened
    started: torch.cuda.Event
    done: torch.cuda.Event
    on_busy: Callable[[float], None]  # told how long the device worked on it
    launch_choice: Callable[[], Scores] | None  # None: it is launched
    scores: Scores = field(default_factory=list)

    @torch.inference_mode()
    def choose(self) -> None:
        if self.launch_choice is not None:
            self.scores, self.launch_choice = self.launch_choice(), None
            self.done.record()

    def result(self) -> StepResult:
        assert self.launch_choice is None
        self.done.synchronize()
        self.on_busy(self.started.elapsed_time(self.done) / 1e3)
        rows = zip(self.token_ids.tolist(), self.scores, strict=True)
        return StepResult([_sampled(*next(rows)) if s.sample is not None else None for s in self.plan.slices])


@dataclass(frozen=True)
class DecodeGraph:
    sizes: Sizes  # of the inputs that it reads
    graph: torch.cuda.CUDAGraph
    logits: Tensor  # [batch, vocab]
    best: Tensor  # [batch]: the greedy choice


class CudaRunner:
    overlaps = True

    def __init__(
        self,
        model: CausalLM,
        ops: TritonOps,
        kv: list[LayerKV],
        *,
        max_num_seqs: int,
        chunk_tokens: int,
        table_width: int,
        mover: BlockMover | None = None,
    ) -> None:
        self._model = model
        self._mover = mover or BlockMover(ops, kv)
        self._ops = ops
        self._kv = kv
        self._table_width = table_width
        self._wanted_pieces = pieces_wanted(model.config.num_kv_heads, ops.device)
        most_tokens = chunk_tokens + max_num_seqs  # decodes go even where prompts have filled the step
        most = Sizes(most_tokens, max_num_seqs, max_num_seqs, table_width, self._room(max_num_seqs)).total
        self._staging = [torch.empty(most, dtype=torch.int32, pin_memory=True) for _ in range(_NUM_STAGES)]
        self._answers = [torch.empty(max_num_seqs, dtype=torch.int32, pin_memory=True) for _ in range(_NUM_STAGES)]
        self._inputs = torch.zeros(most, dtype=torch.int32, device=ops.device)
        self._sampled = torch.zeros(max_num_seqs, dtype=torch.int32, device=ops.device)
        self._rows: dict[str, int] = {}  # where in `_sampled` each sequence's newest token is
        self._num_steps = 0
        self._ladder = graph_ladder(max_num_seqs)
        self._graphs: dict[tuple[int, bool], DecodeGraph] = {}  # by batch size, and whether prefixes are shared
        self._busy_s = 0.0

    def busy_s(self) -> float:
        """How long the device has worked on steps whose results were read."""
        return self._busy_s

    @torch.inference_mode()
    def capture(self) -> None:
        """Record the decode graphs, largest first so that the smaller ones share its memory."""
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._ladder):
            sizes = self._graph_sizes(size)
            if sizes.sharing:
                self._graphs[size, True] = self._capture(sizes, pool)
            self._graphs[size, False] = self._capture(replace(sizes, sharing=None), pool)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> PendingStep:
        started, done = _event(), _event()
        started.record()
        if plan.copies:
            self._mover.move(plan.copies)
        specs = [s.sample for s in plan.slices if s.sample is not None]
        if all(s.num_tokens == 1 and s.sample is not None for s in plan.slices) and self._graphs:
            logits, best = self._replay(plan.slices)
        else:
            logits, best = self._run(plan.slices)
        self._rows = {s.request_id: row for row, s in enumerate(s for s in plan.slices if s.sample is not None)}
        answer = self._answers[self._num_steps % _NUM_STAGES][: len(specs)]
        self._num_steps += 1
        launch_choice = partial(self._choose, logits, best, specs, answer)
        step = PendingStep(plan, answer, started, done, self._add_busy, launch_choice)
        if all(spec.mask is None for spec in specs):  # else some may depend on tokens that nobody has read yet
            step.choose()
        return step

    def _choose(self, logits: Tensor, best: Tensor, specs: list[SampleSpec], answer: Tensor) -> Scores:
        chosen = choose(logits, best, specs)
        self._sampled[: len(specs)] = chosen
        answer.copy_(chosen, non_blocking=True)
        return _scores(logits, chosen, specs)

    def _add_busy(self, seconds: float) -> None:
        self._busy_s += seconds

    def _run(self, slices: list[Slice]) -> tuple[Tensor, Tensor]:
        """Any step, launched kernel by kernel."""
        width = max(len(s.block_ids) for s in slices)
        tokens = sum(s.num_tokens for s in slices)
        rows = sum(s.sample is not None for s in slices)
        sizes = Sizes(tokens, len(slices), rows, width, self._room(len(slices)))
        if not self._stage(slices, sizes):
            sizes = replace(sizes, sharing=None)
        self._send(sizes)
        num_decodes = sum(s.num_tokens == 1 for s in slices)
        logits = self._forward(sizes, num_decodes)
        return logits, argmax(logits)

    def _replay(self, slices: list[Slice]) -> tuple[Tensor, Tensor]:
        size = self._ladder[bisect_left(self._ladder, len(slices))]
        graph = self._graphs[size, self._stage(slices, self._graph_sizes(size))]
        self._send(graph.sizes)
        graph.graph.replay()
        return graph.logits[: len(slices)], graph.best[: len(slices)]

    def _graph_sizes(self, size: int) -> Sizes:
        return Sizes(size, size, size, self._table_width, self._room(size))

    def _room(self, num_sequences: int) -> Room | None:
        """For prefixes that are shared. A window may begin after a prefix: with one every sequence is on its own."""
        config = self._model.config
        if num_sequences < LEAST_MEMBERS or any(config.windows):
            return None
        tile = sequences_per_tile(config.num_heads, config.num_kv_heads)
        return Room(num_sequences, tile, self._wanted_pieces)

    def _stage(self, slices: list[Slice], sizes: Sizes) -> bool:
        """Write the step's integers where they are sent from. Returns whether prefixes are shared."""
        host = Inputs.views(self._staging[self._num_steps % _NUM_STAGES].numpy(), sizes)
        num_decodes = write(host, slices, self._rows)
        if not host.shared:
            return False
        return share(host.block_tables, host.positions[:num_decodes], self._kv[0].block_size, SharedViews(*host.shared))

    def _send(self, sizes: Sizes) -> None:
        stage = self._staging[self._num_steps % _NUM_STAGES]
        self._inputs[: sizes.total].copy_(stage[: sizes.total], non_blocking=True)

    def _forward(self, sizes: Sizes, num_decodes: int) -> Tensor:
        inputs = Inputs.views(self._inputs, sizes)
        return self._model(as_batch(inputs, self._sampled, num_decodes), self._kv)

    def _capture(self, sizes: Sizes, pool: Any) -> DecodeGraph:
        self._inputs.zero_()  # a step of padding
        self._forward(sizes, sizes.sequences)  # compiles what was not compiled yet
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = self._forward(sizes, sizes.sequences)
            best = argmax(logits)
        return DecodeGraph(sizes, graph, logits, best)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def graph_ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes with a graph of their own: dense where a step is short, then every 16."""
    steps = [1, 2, 4, *range(8, 32, 8), *range(32, max_num_seqs, 16)]
    return [size for size in steps if size < max_num_seqs] + [max_num_seqs]


def _scores(logits: Tensor, chosen: Tensor, specs: list[SampleSpec]) -> Scores:
    wanted = (spec.params.num_logprobs for spec in specs)
    return [logprobs(logits[i], chosen[i], count) if count is not None else None for i, count in enumerate(wanted)]


def _sampled(token_id: int, scores: Tensor | None) -> Sampled:
    if scores is None:
        return Sampled([token_id])
    own, *top = scores.tolist()  # [(id, logprob)]
    return Sampled([token_id], [TokenLogprobs(own[1], [(int(other), value) for other, value in top])])
