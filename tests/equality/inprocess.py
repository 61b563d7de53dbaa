"""The engine without its process: scheduler, cache and runner, one step at a time, with everything it said kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import islice

import torch
from torch import Tensor

from penstock.core.model_config import ModelConfig
from penstock.core.request import Request, TokenLogprobs
from penstock.kv.cache import KVCache
from penstock.kv.states import StateSlots
from penstock.model.batch import Batch
from penstock.model.layers import CausalLM
from penstock.model.ops import AttentionSpec, LayerKV, Ops
from penstock.model.shard import Shard
from penstock.model.stages import Stage
from penstock.model.states import state_shape
from penstock.model.vision import VisionEncoder
from penstock.runner.images import ImageTable
from penstock.runner.lora import RunnerAdapters
from penstock.runner.moving import BlockMover, PlainCopies
from penstock.runner.runner import ModelRunner
from penstock.sched.budget import StepBudget
from penstock.sched.images import ImageSlots
from penstock.sched.lora import AdapterSlots
from penstock.sched.plan import StepPlan
from penstock.sched.scheduler import Scheduler
from penstock.sched.sequence import Sequence as LiveSequence
from tests.model.paged import kv_shape, soiled_states

MAX_STEPS = 2000


class Recorder:
    """A model that remembers the logits of its last step."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self.logits = torch.empty(0)

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    @property
    def spec(self) -> AttentionSpec:
        return self._model.spec

    def __call__(self, batch: Batch, kv: Sequence[LayerKV]) -> Tensor:
        self.logits = self._model(batch, kv)
        return self.logits


class InProcess:
    def __init__(
        self,
        model: CausalLM,
        ops: Ops,
        *,
        block_size: int = 4,
        num_blocks: int = 64,
        chunk_tokens: int = 256,
        max_num_seqs: int = 8,
        share_prefixes: bool = True,
        guess: Callable[[LiveSequence], list[int]] | None = None,
        adapters: RunnerAdapters | None = None,
        num_slots: int = 0,
        host_blocks: int = 0,
        encoder: VisionEncoder | None = None,
        image_tokens: int = 256,
        step_image_tokens: int = 256,
    ) -> None:
        """`guess`: drafts for a sequence that decodes. `image_tokens`: whose embeddings are kept, and
        `step_image_tokens` that are encoded in a step."""
        budget = StepBudget(chunk_tokens, target_s=None, floor=block_size)
        shape = state_shape(model.config, Shard(), Stage())
        self.cache = KVCache(
            num_blocks,
            block_size,
            share_prefixes=share_prefixes,
            host_blocks=host_blocks,
            states=StateSlots(max_num_seqs, 4, min_tokens=block_size) if shape is not None else None,
        )
        images = ImageSlots(image_tokens, step_image_tokens) if encoder is not None else None
        self.scheduler = Scheduler(
            self.cache, budget, max_num_seqs=max_num_seqs, adapters=AdapterSlots(num_slots), images=images
        )
        self._model = Recorder(model)
        kv = soiled(ops.allocate_kv(kv_shape(model.config, num_blocks, block_size)))
        mover = BlockMover(ops, kv, PlainCopies(ops, kv, host_blocks)) if host_blocks else None
        table = None
        if encoder is not None:
            columns = encoder.config.levels * model.config.hidden_size
            table = ImageTable(encoder, image_tokens, columns, ops.activation_dtype)
        states = soiled_states(shape, max_num_seqs + 4, ops.device) if shape is not None else []
        self._runner = ModelRunner(self._model, ops, kv, adapters, mover, images=table, states=states)
        self._steps = 0
        self._guess = guess
        self.num_copies = 0  # blocks copied before they were written
        self.outputs: dict[str, list[int]] = defaultdict(list)
        self.logprobs: dict[str, list[TokenLogprobs]] = defaultdict(list)
        self.logits: dict[str, list[Tensor]] = defaultdict(list)  # those that each output token was chosen by
        self.cached: dict[str, int] = {}  # prompt tokens taken from the prefix cache

    @property
    def preemptions(self) -> int:
        return self.scheduler.counters.preemptions

    def submit(self, request: Request) -> None:
        self.scheduler.submit(request, float(self._steps))

    def step(self) -> StepPlan | None:
        self._steps += 1
        decoding = self.scheduler.decoding if self._guess is not None else []
        drafts = {s.request.id: self._guess(s) for s in decoding} if self._guess is not None else {}
        plan = self.scheduler.plan(float(self._steps), drafts)
        if plan is None:
            return None
        self.num_copies += len(plan.copies)
        result = self._runner.submit(plan).result()
        rows = iter(self._model.logits)
        for planned, sampled in zip(plan.slices, result.sampled, strict=True):
            if sampled is not None:
                own = list(islice(rows, 1 + len(planned.ahead)))
                self.logits[planned.request_id] += own[: len(sampled.token_ids)]
        assert next(rows, None) is None
        for event in self.scheduler.commit(plan, result, float(self._steps)):
            self.outputs[event.request_id] += event.token_ids
            self.logprobs[event.request_id] += event.logprobs or []
            if event.cached_tokens is not None:
                self.cached[event.request_id] = event.cached_tokens
        return plan

    def run(self, *requests: Request, apart: int = 0) -> None:
        """Submit the requests, `apart` steps after each other, and step until nothing is left to do."""
        for request in requests:
            self.submit(request)
            for _ in range(apart):
                self.step()
        for _ in range(MAX_STEPS):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the engine did not finish its work")


def soiled(kv: list[LayerKV]) -> list[LayerKV]:
    """Blocks are reused, so a fresh cache is no special case: fill it with numbers that show when they are read."""
    for layer in kv:
        for cache in layer.caches:
            cache.view(torch.uint8).fill_(0x42)  # 48.5 in every format
    return kv
