"""The runner for a GPU: a step is launched and not waited for; the next may be launched before its tokens are read.

Sampled tokens stay on the device, where the next step picks them up; the host gets a copy when it asks. Steps of
decodes alone are CUDA graphs, one per batch size of a ladder; smaller batches are padded with sequences of no context.
A second graph of each size is for steps whose sequences share prefixes, and fewer are for steps with adapters. Drafts
are more decodes of their sequence, in graphs that store all keys and values before anybody attends to them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from penstock.model.batch import ImageRows, LayerState
from penstock.model.layers import CausalLM
from penstock.model.ops import LayerKV, Ops
from penstock.model.ops.triton.attention.shared_prefix import pieces_wanted, sequences_per_tile
from penstock.model.ranks import Ranks, SingleRank
from penstock.model.stages import Stage
from penstock.model.states import copy_states
from penstock.runner.decode_graphs import DecodeGraphs, best_of, coarse_ladder, graph_ladder, rung
from penstock.runner.device_sampler import choose
from penstock.runner.images import ImageTable
from penstock.runner.limits import Limits
from penstock.runner.lora import RunnerAdapters
from penstock.runner.moving import BlockMover
from penstock.runner.pending import PendingStep, Scores, event, sampled, score
from penstock.runner.rows import spread
from penstock.runner.runner import Tell, in_step, merge_size_of, taken
from penstock.runner.sharing import MIN_MEMBERS, Room, SharedViews, share
from penstock.runner.step_inputs import Inputs, Sizes, StepInputs, as_batch, images_of, write
from penstock.runner.step_meter import StepMeter, communication_of
from penstock.runner.verify import choices, newest_rows
from penstock.sched.plan import Sampled, SampleSpec, Slice, StepPlan


class CudaRunner:
    overlaps = True

    def __init__(
        self,
        model: CausalLM,
        ops: Ops,
        kv: list[LayerKV],
        limits: Limits,
        adapters: RunnerAdapters | None = None,
        mover: BlockMover | None = None,
        ranks: Ranks | None = None,
        stage: Stage = Stage(),  # noqa: B008 (frozen)
        images: ImageTable | None = None,
        states: Sequence[LayerState] = (),
    ) -> None:
        """`ranks`: those that share the model; None: there is one. `stage`: of a pipeline, which of its stages.
        `images`: of a model that takes them. `states`: of one whose sequences have recurrent ones."""
        self._states = states
        self._images = images
        self._merge_size = merge_size_of(model.config)
        self._stage_of_pipeline = stage
        self._model = model
        self._ranks = ranks or SingleRank()
        self._tell: Tell | None = None
        self._mover = mover or BlockMover(ops, kv)
        self._adapters = adapters
        self._ops = ops
        self._kv = kv
        self._table_width = limits.table_width
        self._wanted_pieces = pieces_wanted(model.spec.num_kv_heads, ops.device)
        max_num_seqs, most_rows = limits.max_num_seqs, limits.most_rows
        most_tokens = limits.chunk_tokens + max_num_seqs  # decodes go even where prompts have filled the step
        self._ladder = graph_ladder(max_num_seqs)
        self._rows_ladder = graph_ladder(most_rows)[1:] if most_rows else []
        rows = max_num_seqs + most_rows  # more than any graph has: drafts for some, and others beside them
        room, is_mrope = self._room(max_num_seqs), self._merge_size > 0
        mixed = Sizes(
            most_tokens,
            max_num_seqs,
            rows,
            self._table_width,
            room,
            adapted=True,
            mrope=is_mrope,
            recurrent=bool(states),
        )
        # Before graphs are captured, a step of drafts is run as it is, and its sequences may share and have adapters.
        decodes = replace(self._graph_sizes(max(max_num_seqs, most_rows)), adapted=True)
        most = max(mixed.total, decodes.total)
        # A step's inputs may still be on their way when those of others are written.
        self._num_stages = limits.num_ahead + 1
        self._staging = [torch.empty(most, dtype=torch.int32, pin_memory=True) for _ in range(self._num_stages)]
        self._answers = [torch.empty(rows, dtype=torch.int32, pin_memory=True) for _ in range(self._num_stages)]
        self._inputs = torch.zeros(most, dtype=torch.int32, device=ops.device)
        self._sampled = torch.zeros(rows, dtype=torch.int32, device=ops.device)
        self._rows: dict[str, int] = {}  # where in `_sampled` each sequence's newest token is
        self._num_steps = 0
        communication = communication_of(self._ranks, stage)
        self.meter = StepMeter(communication)
        self._graphs = DecodeGraphs(lambda sizes: self._forward(sizes, sizes.sequences), communication)
        self._timed: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()  # steps that nobody waits for

    def busy_s(self) -> float:
        """Seconds that the device has worked on steps whose results were read."""
        return self.meter.busy_s

    @torch.inference_mode()
    def capture(self) -> None:
        """Record the decode graphs."""
        self._inputs.zero_()  # a step of padding
        self._graphs.capture(self._graph_kinds())

    def _graph_kinds(self) -> Iterator[Sizes]:
        kinds = [(size, True) for size in self._rows_ladder] + [(size, False) for size in self._ladder]
        for size, stores_first in sorted(kinds, reverse=True):
            sizes = self._graph_sizes(size, stores_first=stores_first)
            if sizes.sharing:
                yield sizes
            yield replace(sizes, sharing=None)
        if self._adapters is not None:
            yield from (self._graph_sizes(size, stores_first=first, adapted=True) for size, first in self._coarse())

    def _coarse(self) -> list[tuple[int, bool]]:
        kinds = [(self._rows_ladder, True), (self._ladder, False)]
        return [(size, first) for ladder, first in kinds if ladder for size in reversed(coarse_ladder(ladder[-1]))]

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> PendingStep:
        started, done = event(), event()
        started.record()
        inputs = self.prepare(plan)
        if self._tell is not None:
            self._tell(inputs)
        with in_step(self._tell), self.meter.step(is_waited_for=False):
            logits, best = self.forward(inputs)
        self._rows = newest_rows(plan.slices)
        specs = choices(plan.slices)
        answer = self._answers[self._num_steps % self._num_stages][: len(specs)]
        self._num_steps += 1
        launch_choice = partial(self.choose, logits, specs, best, answer)
        step = PendingStep(plan, answer, started, done, self._add_busy, launch_choice)
        if all(spec.mask is None for spec in specs):  # else some may depend on tokens that nobody has read yet
            step.choose()
        return step

    def choose(self, logits: Tensor, specs: list[SampleSpec], best: Tensor, answer: Tensor) -> Scores:
        with in_step(self._tell):
            chosen = choose(logits, best, specs)
            if specs:
                self._sampled[: len(specs)] = self._ranks.broadcast(chosen)
        answer.copy_(chosen, non_blocking=True)
        return score(logits, chosen, specs)

    def _add_busy(self, seconds: float) -> None:
        self.meter.busy_s += seconds

    def _singles(self, slices: list[Slice]) -> list[Slice] | None:
        """The step as decodes alone; None: it cannot be."""
        if all(s.num_tokens == 1 for s in slices):
            return slices
        return spread(slices, self._rows_ladder[-1]) if self._rows_ladder else None

    def prepare(self, plan: StepPlan) -> StepInputs:
        """Pack what `forward` needs of a plan, here or on another rank, into the buffer that it is sent from."""
        singles = self._singles(plan.slices)
        slices = singles or plan.slices
        num_rows = sum(1 + len(s.ahead) for s in plan.slices if s.sample is not None)
        images = images_of(plan, slices)
        is_captured = bool(singles and self._graphs and not images.parts)
        sizes = self._sizes(slices, num_rows, stores_first=slices is not plan.slices, is_captured=is_captured)
        if not self._stage(slices, sizes):
            sizes = replace(sizes, sharing=None)
        num_decodes = sizes.sequences if is_captured else sum(s.num_tokens == 1 for s in slices)
        ints = self._stage_of_step[: sizes.total].numpy()
        return StepInputs(
            sizes,
            ints,
            num_decodes,
            num_rows,
            is_captured,
            plan.copies,
            plan.placements,
            images,
            plan.state_copies,
        )

    def lead(self, tell: Tell) -> None:
        self._tell = tell

    @torch.inference_mode()
    def follow(self, step: StepInputs, specs: list[SampleSpec] | None = None) -> list[Sampled]:
        """The tokens that the first rank chooses come here on the device too: the next step may begin with them. No
        step of a pipeline does, and its last stage chooses the tokens."""
        with self._in_time(), self.meter.step(is_waited_for=False):
            logits, best = self.forward(step)
        answer = self._answers[self._num_steps % self._num_stages][: step.num_rows]
        self._num_steps += 1
        if specs is not None:  # the leader takes the answer for the end of the step, also where no token was chosen
            chosen = choose(logits, best, specs)
            answer.copy_(chosen, non_blocking=True)
            scores = score(logits, chosen, specs)
            torch.cuda.current_stream().synchronize()
            return sampled(answer, scores)
        if step.num_rows and not self._is_in_pipeline:
            self._sampled[: step.num_rows] = self._ranks.broadcast(self._sampled[: step.num_rows])
        return []

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        """Work launched meanwhile is timed by the device; times of earlier steps that it has done are added up."""
        while self._timed and self._timed[0][1].query():  # type: ignore[no-untyped-call]
            started, done = self._timed.popleft()
            self._add_busy(started.elapsed_time(done) / 1e3)
        started, done = event(), event()
        started.record()
        yield
        done.record()
        self._timed.append((started, done))

    @property
    def _is_in_pipeline(self) -> bool:
        return self._stage_of_pipeline.layers is not None

    def rehearse(self, plan: StepPlan) -> None:
        """Run a step, and wait for it. All ranks do so at once, and nobody is told."""
        if not self._is_in_pipeline:
            self.submit(plan).result()
            return
        is_last = self._stage_of_pipeline.after is None
        self.follow(self.prepare(plan), choices(plan.slices) if is_last else None)
        torch.cuda.synchronize()

    @torch.inference_mode()
    def forward(self, step: StepInputs) -> tuple[Tensor, Tensor]:
        """The logits of every row that a token is chosen from, and the best token of each."""
        if step.copies:
            self._mover.move(step.copies)
        copy_states(self._states, step.state_copies)
        if step.placements and self._adapters is not None:
            self._adapters.place(step.placements)
        images = taken(self._images, step)
        self._send(step)
        if step.is_captured:
            graph = self._graphs[step.sizes]
            graph.graph.replay()
            self.meter.add_communication(graph.communication_s)
            return graph.logits[: step.num_rows], graph.best[: step.num_rows]
        logits = self._forward(step.sizes, step.num_decodes, images)
        return logits, best_of(logits)

    def _sizes(self, slices: list[Slice], num_rows: int, *, stores_first: bool, is_captured: bool) -> Sizes:
        adapted = self._are_adapted(slices)
        if is_captured:
            ladder = self._rows_ladder if stores_first else self._ladder
            size = rung(coarse_ladder(ladder[-1]) if adapted else ladder, len(slices))
            return self._graph_sizes(size, stores_first=stores_first, adapted=adapted)
        width = max(len(s.block_ids) for s in slices)
        tokens = sum(s.num_tokens for s in slices)
        room, is_mrope = self._room(len(slices)), self._merge_size > 0
        return Sizes(tokens, len(slices), num_rows, width, room, stores_first, adapted, is_mrope, bool(self._states))

    def _graph_sizes(self, size: int, *, stores_first: bool = False, adapted: bool = False) -> Sizes:
        room = None if adapted else self._room(size)  # only those of one adapter could share: not worth as many graphs
        is_mrope, is_recurrent = self._merge_size > 0, bool(self._states)
        return Sizes(size, size, size, self._table_width, room, stores_first, adapted, is_mrope, is_recurrent)

    def _are_adapted(self, slices: list[Slice]) -> bool:
        return self._adapters is not None and any(s.slot is not None for s in slices)

    def _room(self, num_sequences: int) -> Room | None:
        """Room for attention over shared prefixes. None with windows, since a window may begin after the prefix, and
        with latents, whose kernels already share reads between all heads."""
        spec = self._model.spec
        if num_sequences < MIN_MEMBERS or any(self._model.config.windows) or spec.value_dim is not None:
            return None
        tile = sequences_per_tile(spec.num_group_heads, spec.num_kv_heads)
        return Room(num_sequences, tile, self._wanted_pieces)

    @property
    def _stage_of_step(self) -> Tensor:
        return self._staging[self._num_steps % self._num_stages]

    def _stage(self, slices: list[Slice], sizes: Sizes) -> bool:
        """Write the step's integers where they are sent from. Returns whether prefixes are shared."""
        host = Inputs.views(self._stage_of_step.numpy(), sizes)
        num_decodes = write(host, slices, self._rows, self._merge_size)
        if not host.shared:
            return False
        # Each rank keeps as many tokens of a whole block of the table: what is shared is the same on all of them.
        places = host.positions[:num_decodes] // self._kv[0].tokens.size
        return share(host.block_tables, places, self._kv[0].block_size, SharedViews(*host.shared))

    def _send(self, step: StepInputs) -> None:
        stage, total = self._stage_of_step[: step.sizes.total], step.sizes.total
        if step.ints.ctypes.data != stage.data_ptr():  # it was prepared elsewhere
            stage.numpy()[:] = step.ints
        self._inputs[:total].copy_(stage, non_blocking=True)

    def _forward(self, sizes: Sizes, num_decodes: int, images: ImageRows | None = None) -> Tensor:
        inputs = Inputs.views(self._inputs, sizes)
        batch = as_batch(inputs, self._sampled, num_decodes, self._states)
        return self._model(replace(batch, stores_first=sizes.stores_first, images=images), self._kv)
