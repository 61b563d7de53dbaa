"""The runner for a GPU: a step is launched and not waited for; the next may be launched before its tokens are read.

Sampled tokens stay on the device, where the next step picks them up; the host gets a copy when it asks. Steps of
decodes alone are CUDA graphs, one per batch size of a ladder; smaller batches are padded with sequences of no context.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.core.request import TokenLogprobs
from penstock.model.batch import Batch
from penstock.model.layers import CausalLM
from penstock.model.ops import LayerKV
from penstock.model.ops.triton import TritonOps
from penstock.runner.device_sampler import choose, logprobs
from penstock.sched.plan import Sampled, SampleSpec, Slice, StepPlan, StepResult

_NUM_STAGES = 2  # a step's inputs may still be on their way when the next one's are written, but not those after it


@dataclass(frozen=True)
class PendingStep:
    """A step on the device. Asking for its result waits for it."""

    plan: StepPlan
    token_ids: Tensor  # pinned; valid once `done` has happened
    started: torch.cuda.Event
    done: torch.cuda.Event
    scores: list[Tensor | None]  # per sampled row, on the device: see device_sampler.logprobs
    on_busy: Callable[[float], None]  # told how long the device worked on it

    def result(self) -> StepResult:
        self.done.synchronize()
        self.on_busy(self.started.elapsed_time(self.done) / 1e3)
        rows = zip(self.token_ids.tolist(), self.scores, strict=True)
        return StepResult([_sampled(*next(rows)) if s.sample is not None else None for s in self.plan.slices])


@dataclass(frozen=True)
class Inputs:
    """A step's integers: views of one buffer, so that they travel in one copy."""

    token_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    sources: Tensor  # [tokens]: the row of the step before that sampled this token; -1: it is in token_ids
    query_starts: Tensor  # [sequences + 1]
    context_lens: Tensor  # [sequences]
    logit_rows: Tensor  # [rows]
    block_tables: Tensor  # [sequences, width]

    @classmethod
    def views(cls, buffer: Tensor, tokens: int, sequences: int, rows: int, width: int) -> tuple[Inputs, int]:
        sizes = (tokens, tokens, tokens, sequences + 1, sequences, rows, sequences * width)
        *ends, used = accumulate(sizes)
        parts = [buffer[start:end] for start, end in zip((0, *ends), (*ends, used), strict=True)]
        token_ids, positions, sources, query_starts, context_lens, logit_rows, tables = parts
        block_tables = tables.view(sequences, width)
        return cls(token_ids, positions, sources, query_starts, context_lens, logit_rows, block_tables), used

    def as_batch(self, sampled: Tensor, num_decodes: int) -> Batch:
        """Fill in the tokens that never left the device."""
        flown = sampled[self.sources.clamp(min=0)]
        token_ids = torch.where(self.sources >= 0, flown, self.token_ids)
        return Batch(
            token_ids,
            self.positions,
            self.query_starts,
            self.context_lens,
            self.block_tables,
            self.logit_rows.long(),
            num_decodes,
        )


@dataclass(frozen=True)
class DecodeGraph:
    inputs_used: int  # integers of the input buffer that it reads
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
    ) -> None:
        self._model = model
        self._ops = ops
        self._kv = kv
        self._table_width = table_width
        most_tokens = chunk_tokens + max_num_seqs  # decodes go even where prompts have filled the step
        most = 3 * most_tokens + 3 * max_num_seqs + 1 + max_num_seqs * table_width
        self._staging = [torch.empty(most, dtype=torch.int32, pin_memory=True) for _ in range(_NUM_STAGES)]
        self._answers = [torch.empty(max_num_seqs, dtype=torch.int32, pin_memory=True) for _ in range(_NUM_STAGES)]
        self._inputs = torch.zeros(most, dtype=torch.int32, device=ops.device)
        self._sampled = torch.zeros(max_num_seqs, dtype=torch.int32, device=ops.device)
        self._rows: dict[str, int] = {}  # where in `_sampled` each sequence's newest token is
        self._num_steps = 0
        self._ladder = graph_ladder(max_num_seqs)
        self._graphs: dict[int, DecodeGraph] = {}
        self._busy_s = 0.0

    def busy_s(self) -> float:
        """How long the device has worked on steps whose results were read."""
        return self._busy_s

    @torch.inference_mode()
    def capture(self) -> None:
        """Record the decode graphs, largest first so that the smaller ones share its memory."""
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._ladder):
            self._graphs[size] = self._capture(size, pool)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> PendingStep:
        started, done = _event(), _event()
        started.record()
        if plan.copies:
            self._ops.copy_blocks(self._kv, plan.copies)
        specs = [s.sample for s in plan.slices if s.sample is not None]
        if all(s.num_tokens == 1 and s.sample is not None for s in plan.slices) and self._graphs:
            logits, best = self._replay(plan.slices)
        else:
            logits, best = self._run(plan.slices)
        chosen = choose(logits, best, specs)
        self._sampled[: len(specs)] = chosen
        self._rows = {s.request_id: row for row, s in enumerate(s for s in plan.slices if s.sample is not None)}
        answer = self._answers[self._num_steps % _NUM_STAGES][: len(specs)]
        answer.copy_(chosen, non_blocking=True)
        scores = _scores(logits, chosen, specs)
        done.record()
        self._num_steps += 1
        return PendingStep(plan, answer, started, done, scores, self._add_busy)

    def _add_busy(self, seconds: float) -> None:
        self._busy_s += seconds

    def _run(self, slices: list[Slice]) -> tuple[Tensor, Tensor]:
        """Any step, launched kernel by kernel."""
        width = max(len(s.block_ids) for s in slices)
        tokens = sum(s.num_tokens for s in slices)
        rows = sum(s.sample is not None for s in slices)
        inputs, used = Inputs.views(self._inputs, tokens, len(slices), rows, width)
        self._upload(slices, tokens, len(slices), rows, width, used)
        num_decodes = sum(s.num_tokens == 1 for s in slices)
        logits = self._forward(inputs, num_decodes)
        return logits, logits.argmax(dim=-1)

    def _replay(self, slices: list[Slice]) -> tuple[Tensor, Tensor]:
        size = self._ladder[bisect_left(self._ladder, len(slices))]
        graph = self._graphs[size]
        self._upload(slices, size, size, size, self._table_width, graph.inputs_used)
        graph.graph.replay()
        return graph.logits[: len(slices)], graph.best[: len(slices)]

    def _upload(self, slices: list[Slice], tokens: int, sequences: int, rows: int, width: int, used: int) -> None:
        """Write the step's integers and send them; what is beyond the slices is padding."""
        stage = self._staging[self._num_steps % _NUM_STAGES]
        views, _ = Inputs.views(stage, tokens, sequences, rows, width)
        host = {name: view.numpy() for name, view in vars(views).items()}
        starts = [0, *accumulate(s.num_tokens for s in slices)]
        num_tokens, count = starts[-1], len(slices)
        sampled = [end - 1 for end, planned in zip(starts[1:], slices, strict=True) if planned.sample is not None]
        host["query_starts"][:count] = starts[:-1]
        host["context_lens"][:count] = [s.start + s.num_tokens for s in slices]
        host["logit_rows"][: len(sampled)] = sampled
        # Decodes come first, and there may be hundreds: all of them at once. Chunks are long, and few.
        singles = next((i for i, s in enumerate(slices) if s.num_tokens > 1), count)
        ones = slices[:singles]
        host["token_ids"][:singles] = [s.token_ids[0] if s.token_ids else 0 for s in ones]
        host["sources"][:singles] = [-1 if s.token_ids else self._rows[s.request_id] for s in ones]
        host["positions"][:singles] = [s.start for s in ones]
        for begin, planned in zip(starts[singles:], slices[singles:], strict=False):
            self._write_chunk(host, begin, planned)
        for row, planned in zip(host["block_tables"], slices, strict=False):
            row[: len(planned.block_ids)] = planned.block_ids
        _pad(host, num_tokens, count, len(sampled))
        self._inputs[:used].copy_(stage[:used], non_blocking=True)

    def _write_chunk(self, host: dict[str, npt.NDArray[np.int32]], begin: int, planned: Slice) -> None:
        end, known = begin + planned.num_tokens, begin + len(planned.token_ids)
        host["token_ids"][begin:known] = planned.token_ids
        host["sources"][begin:known] = -1
        if planned.awaits_token:
            host["token_ids"][known] = 0
            host["sources"][known] = self._rows[planned.request_id]
        host["positions"][begin:end] = np.arange(planned.start, planned.start + planned.num_tokens)

    def _forward(self, inputs: Inputs, num_decodes: int) -> Tensor:
        return self._model(inputs.as_batch(self._sampled, num_decodes), self._kv)

    def _capture(self, size: int, pool: Any) -> DecodeGraph:
        inputs, used = Inputs.views(self._inputs, size, size, size, self._table_width)
        self._upload([], size, size, size, self._table_width, used)
        self._forward(inputs, size)  # compiles what was not compiled yet
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = self._forward(inputs, size)
            best = logits.argmax(dim=-1)
        return DecodeGraph(used, graph, logits, best)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def graph_ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes with a graph of their own: dense where a step is short, then every 16."""
    steps = [1, 2, 4, *range(8, 32, 8), *range(32, max_num_seqs, 16)]
    return [size for size in steps if size < max_num_seqs] + [max_num_seqs]


def _pad(host: dict[str, npt.NDArray[np.int32]], tokens: int, sequences: int, rows: int) -> None:
    """Sequences of no context, one token each, which the kernels pass over."""
    host["token_ids"][tokens:] = 0
    host["sources"][tokens:] = -1
    host["positions"][tokens:] = 0
    host["context_lens"][sequences:] = 0
    missing = len(host["query_starts"]) - sequences
    host["query_starts"][sequences:] = range(tokens, tokens + missing)
    host["logit_rows"][rows:] = range(tokens, tokens + len(host["logit_rows"]) - rows)


def _scores(logits: Tensor, chosen: Tensor, specs: list[SampleSpec]) -> list[Tensor | None]:
    wanted = (spec.params.num_logprobs for spec in specs)
    return [logprobs(logits[i], chosen[i], count) if count is not None else None for i, count in enumerate(wanted)]


def _sampled(token_id: int, scores: Tensor | None) -> Sampled:
    if scores is None:
        return Sampled([token_id])
    own, *top = scores.tolist()  # [(id, logprob)]
    return Sampled([token_id], [TokenLogprobs(own[1], [(int(other), value) for other, value in top])])
