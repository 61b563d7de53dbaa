"""A fake runner, for tests and simulation: it computes nothing, but it is strict.

Its cache holds token ids instead of keys and values. Each step writes the tokens it is given into their slots and the
next token is a function of everything read back through the block table, so a scheduler that hands out a wrong, stale
or foreign block gets wrong tokens, just as a real device would give. A recurrent state is all tokens that went into it:
one that is given a token too many, too few or of another sequence is found out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain, takewhile
from typing import NamedTuple, cast
from zlib import crc32

from penstock.core.parking import MemoryChange
from penstock.core.request import TokenLogprobs
from penstock.sched.plan import Sampled, SampleSpec, Slice, StepHandle, StepPlan, StepResult


class FakeState(NamedTuple):
    """The fake model's hash of the tokens that it has read. Reading on costs what is new: long answers stay cheap."""

    value: int

    @classmethod
    def of(cls, context: Iterable[int] = (), *, seed: int = 0) -> FakeState:
        """`seed` is that of a request that is not greedy."""
        return cls(17 + seed).after(context)

    def after(self, token_ids: Iterable[int]) -> FakeState:
        value = self.value
        for token_id in token_ids:
            value = (value * 1_000_003 + token_id + 1) % 2_147_483_647
        return FakeState(value)

    def token(self, vocab_size: int) -> int:
        """The token that the fake model says next."""
        return self.value % vocab_size


def fake_token(context: Sequence[int], vocab_size: int, *, seed: int = 0) -> int:
    """The token that the fake model says after `context`."""
    return FakeState.of(context, seed=seed).token(vocab_size)


def adapter_seed(adapter: str) -> int:
    """Seed by which an adapter makes another model of the fake one."""
    return crc32(adapter.encode()) if adapter else 0


def fake_logprobs(token_id: int, vocab_size: int, num_logprobs: int) -> TokenLogprobs:
    """The chosen token has probability 1/2, and each next best half of the one before."""
    top = [((token_id + rank) % vocab_size, -(rank + 1) * math.log(2)) for rank in range(num_logprobs)]
    return TokenLogprobs(-math.log(2), top)


class FakeRunner:
    def __init__(
        self, num_blocks: int, block_size: int, *, vocab_size: int = 1000, overlaps: bool = False, host_blocks: int = 0
    ) -> None:
        self.overlaps = overlaps
        self.num_blocks = num_blocks
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._slots: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks + host_blocks)]
        self._newest: dict[str, int] = {}  # the last token of each sequence, as a device would keep it
        self._adapters: dict[int, str] = {}  # by slot
        self._read: dict[str, _Read] = {}  # by the sequences of the last step
        self._states: dict[int, list[int]] = {}  # recurrent ones by slot
        self._is_parked = False

    def park(self) -> MemoryChange:
        """The cache's content is gone, as on a device; what is on the host is not."""
        self._is_parked = True
        self._slots[: self.num_blocks] = [[None] * self._block_size for _ in range(self.num_blocks)]
        return MemoryChange({"release": 0.0}, self.num_blocks * self._block_size)

    def wake(self) -> MemoryChange:
        self._is_parked = False
        return MemoryChange({"map": 0.0}, self.num_blocks * self._block_size)

    def host_block(self, block: int) -> list[int | None]:
        """One of the host's blocks, to be read and written as a disk's threads would."""
        return self._slots[self.num_blocks + block]

    def submit(self, plan: StepPlan) -> StepHandle:
        assert not self._is_parked, "a parked device is given a step"
        for source, target in plan.copies:
            self._slots[target] = list(self._slots[source])
        for source, target in plan.state_copies:
            self._states[target] = self._states[source]
        self._adapters.update(plan.placements)
        step = _Step(self, plan, [self._run(s) for s in plan.slices])
        if not self.overlaps or all(s.sample is None or s.sample.mask is None for s in plan.slices):
            step.choose()
        return step

    def choose(self, plan: StepPlan, contexts: list[list[int]]) -> StepResult:
        sampled = [
            self._choose_all(context, planned) if planned.sample is not None else None
            for planned, context in zip(plan.slices, contexts, strict=True)
        ]
        self._read = {planned.request_id: self._read[planned.request_id] for planned in plan.slices if planned.sample}
        self._newest = {
            planned.request_id: chosen.token_ids[-1]
            for planned, chosen in zip(plan.slices, sampled, strict=True)
            if chosen is not None
        }
        return StepResult(sampled)

    def _run(self, planned: Slice) -> list[int]:
        """All that the sequence's next token follows; empty: there is none yet."""
        tokens = list(planned.token_ids)
        assert all(block_id < self.num_blocks for block_id in planned.block_ids), "a block of the host's is used"
        if planned.awaits_token:
            tokens.append(self._newest[planned.request_id])
        for position, token_id in enumerate(tokens, planned.start):
            block, offset = divmod(position, self._block_size)
            self._slots[planned.block_ids[block]][offset] = token_id
        if planned.state_slot is not None:
            self._advance_state(planned, tokens)
        if planned.sample is None:
            return []
        length = planned.start + len(tokens)
        block_ids = planned.block_ids[: -(-length // self._block_size)]
        context = list(chain.from_iterable(self._slots[block_id] for block_id in block_ids))[:length]
        assert len(context) == length
        assert None not in context, "a block was read before it was written"
        if planned.state_slot is not None:
            assert self._states[planned.state_slot] == context, "a state is of other tokens than the blocks"
        return cast("list[int]", context)

    def _advance_state(self, planned: Slice, tokens: list[int]) -> None:
        assert planned.state_slot, "slot 0 is nobody's"
        state = self._states[planned.state_slot] if planned.start else []
        assert len(state) == planned.start, "a state goes on at another token than its next"
        self._states[planned.state_slot] = state + tokens

    def _choose_all(self, context: list[int], planned: Slice) -> Sampled:
        """Tokens after the sequence's own, and after each draft as long as they hold."""
        assert planned.sample is not None
        adapter = self._adapters[planned.slot] if planned.slot is not None else ""
        seed = adapter_seed(adapter) + _seed(planned.sample)
        state = self._state_after(planned.request_id, context[: planned.end], seed)
        chosen = [self._choose(state, planned.sample)]
        for end, spec in enumerate(planned.ahead, planned.end + 1):
            assert _seed(spec) == _seed(planned.sample), "one sequence, one seed"
            state = state.after((context[end - 1],))
            chosen.append(self._choose(state, spec))
        pairs = zip(planned.drafts, chosen, strict=False)
        num_held = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1].token_ids[0], pairs))
        held = chosen[: num_held + 1]
        logprobs = None if held[0].logprobs is None else [score for one in held for score in one.logprobs or ()]
        return Sampled([one.token_ids[0] for one in held], logprobs)

    def _state_after(self, request_id: str, context: list[int], seed: int) -> FakeState:
        """All of the context was read from its blocks; only what is new since the last step is read by the model."""
        before = self._read.get(request_id)
        if before is not None and before.seed == seed and context[: len(before.context)] == before.context:
            state = before.state.after(context[len(before.context) :])
        else:
            state = FakeState.of(context, seed=seed)
        self._read[request_id] = _Read(context, seed, state)
        return state

    def _choose(self, state: FakeState, spec: SampleSpec) -> Sampled:
        params = spec.params
        token_id = state.token(self._vocab_size)
        if spec.mask is not None:
            token_id = nearest(token_id, spec.mask.bits())
        if params.allowed_ids:
            token_id = min(params.allowed_ids, key=lambda one: (one - token_id) % self._vocab_size)
        banned = params.words_ending(spec.history[spec.prompt_len :])
        while token_id in banned:
            token_id = (token_id + 1) % self._vocab_size
        if params.num_logprobs is None:
            return Sampled([token_id])
        return Sampled([token_id], [fake_logprobs(token_id, self._vocab_size, params.num_logprobs)])


class _Read(NamedTuple):
    """Progress of the model in reading a sequence."""

    context: list[int]
    seed: int
    state: FakeState


def _seed(spec: SampleSpec) -> int:
    params = spec.params
    seed = 0 if params.is_greedy else params.seed
    if params.watermark is not None:  # what it says then is another text altogether: so much can be seen
        seed += params.watermark.secret[0] + 1
    return seed


def nearest(token_id: int, mask: bytes) -> int:
    """Token that may come: the first from `token_id` on, or else the first of all."""
    bits = int.from_bytes(mask, "little")
    above = bits >> token_id
    return token_id + _lowest(above) if above else _lowest(bits)


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


class _Step:
    def __init__(self, runner: FakeRunner, plan: StepPlan, contexts: list[list[int]]) -> None:
        self._runner = runner
        self._plan = plan
        self._contexts = contexts
        self._outcome: StepResult | None = None

    def choose(self) -> None:
        if self._outcome is None:
            self._outcome = self._runner.choose(self._plan, self._contexts)

    def result(self) -> StepResult:
        assert self._outcome is not None, "its tokens were never chosen"
        return self._outcome
