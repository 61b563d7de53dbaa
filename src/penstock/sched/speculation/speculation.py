"""Draft allocation: each sequence gets as many drafts as pay, by what they have come to and what steps take now.

A draft is worth the chance that it and all before it hold; it costs what it makes the step longer. Its sequence gets
drafts until the next one is worth less than its cost buys elsewhere, which is to say: less than the tokens that the
step would make in that time. A draft costs little with one sequence on the device, since weights are read anyway; with
many, each row costs as much as it brings, and nobody gets any. All of that is measured, and measured again now and
then, since both the text and the machine change. Nobody is slowed down much by what others gain.

Nothing here can change an answer: see `drafting`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from penstock.sched.plan import StepPlan, StepResult
from penstock.sched.sequence import Sequence as LiveSequence
from penstock.sched.speculation.draft_budget import Costs, Outlook
from penstock.sched.speculation.drafting import Drafts, room_of
from penstock.sched.speculation.step_costs import StepCosts

_OPTIMISM = 0.6  # the chance that a draft holds, of which nothing is known yet
_FAITH = 4.0  # as if so many drafts had been seen with it
_KEEP = 0.95  # of what is known of drafts, when others are seen
_FADE = 0.995  # of what is known of a kind that is not tried, at every look at it: so it is tried again
_PATIENCE = 32  # steps without drafts before it is measured again what they would cost; doubles while nothing comes
_MAX_PATIENCE = 4096
_PROBE_TOKENS = 2  # for one in eight, then
_MAX_SLOWDOWN = 1.2  # of the sequence that gains least


class Proposer(Protocol):
    @property
    def is_settled(self) -> bool:
        """Whether its last proposal took no longer than it usually does."""

    @property
    def is_steadfast(self) -> bool:
        """Whether a sequence that has drafts has some whatever the next token is."""

    def look(self, sequence: LiveSequence) -> int | None:
        """Whether it has drafts for a sequence. The number says of what kind: some hold more often than others."""

    def propose(self, wanted: Sequence[tuple[LiveSequence, int]]) -> list[list[int]]:
        """Returns up to the wanted number of drafts for each sequence, which was looked at just before."""


class Chance:
    """Chance that a draft holds if those before it did, from those that were seen."""

    __slots__ = ("_held", "_tried")

    def __init__(self) -> None:
        self._held = self._tried = 0.0

    def given(self, prior: float) -> float:
        return (self._held + _FAITH * prior) / (self._tried + _FAITH)

    def see(self, num_held: int, count: int) -> None:
        """Records that the first `num_held` of `count` drafts in a row held; later ones say nothing."""
        self._held = _KEEP * self._held + num_held
        self._tried = _KEEP * self._tried + num_held + (num_held < count)

    def fade(self) -> None:
        self._held *= _FADE
        self._tried *= _FADE


class Hope(NamedTuple):
    """A sequence that has drafts."""

    sequence: LiveSequence
    kind: int
    chance: float
    most: int


class Speculation:
    def __init__(self, proposer: Proposer, most_tokens: int, costs: Costs | None = None) -> None:
        """`costs`: of steps; those of a device that is never given a step before the last is read, unless given."""
        self._proposer = proposer
        self._most_tokens = most_tokens  # for a sequence in a step
        self._costs = costs or StepCosts()
        self._overall: defaultdict[int, Chance] = defaultdict(Chance)  # by kind
        self._own: WeakKeyDictionary[LiveSequence, defaultdict[int, Chance]] = WeakKeyDictionary()
        self._asked: dict[str, Hope] = {}  # in the step that is under way
        self._idle_steps = 0  # since drafts last paid, in which there were some
        self._patience = _PATIENCE

    def wants(self, decoding: Sequence[LiveSequence]) -> bool:
        """Whether it is worth waiting for the step in flight, to guess what comes after it; these decode in it."""
        return bool(self._choose(decoding, is_early=not self._proposer.is_steadfast))

    def drafts(self, decoding: Sequence[LiveSequence]) -> Drafts:
        """Drafts for the next step, by request id; in it these decode, all of them or as many as fit."""
        wanted = self._choose(decoding)
        self._asked = {hope.sequence.request.id: hope for hope, _ in wanted}
        if not wanted:
            return {}
        proposed = self._proposer.propose([(hope.sequence, count) for hope, count in wanted])
        return dict(zip(self._asked, proposed, strict=True))

    def _choose(self, decoding: Sequence[LiveSequence], *, is_early: bool = False) -> list[tuple[Hope, int]]:
        """Sequences that get drafts, and how many; `is_early`: only if the token in flight is the expected one."""
        room = self._costs.room(len(decoding))
        if not decoding or not room or self._costs.wants_plain(len(decoding)):
            return []
        is_probe = self._idle_steps >= self._patience or not self._costs.knows_drafts(len(decoding))
        if not is_probe and not self._costs.can_pay(len(decoding)):
            self._idle_steps += 1
            return []
        hopes = [hope for sequence in decoding if (hope := self._hope(sequence)) is not None]
        if is_probe:
            few = hopes[: min(1 + len(decoding) // 8, max(1, room // _PROBE_TOKENS))]
            return [(hope, min(_PROBE_TOKENS, hope.most, room)) for hope in few]
        if wanted := self._wanted(hopes, len(decoding), is_early):
            self._idle_steps, self._patience = 0, _PATIENCE
        elif hopes:
            self._idle_steps += 1
        return wanted

    def observe(self, plan: StepPlan, result: StepResult, seconds: float, *, is_ahead: bool = False) -> None:
        """Learns from a step's result, and from how long it took, proposing included; `is_ahead`: it was given to the
        device before the step before it was read."""
        counts = []
        for planned, sampled in zip(plan.slices, result.sampled, strict=True):
            if planned.ahead and sampled is not None:
                counts.append(len(planned.ahead))
                self._learn(planned.request_id, len(sampled.token_ids) - 1, len(planned.ahead))
        has_prompts = any(p.sample is None or p.num_tokens > 1 + len(p.ahead) for p in plan.slices)
        if has_prompts or (counts and not self._proposer.is_settled):
            return
        self._costs.see(len(plan.slices), counts, seconds, is_ahead=is_ahead)
        if counts and self._idle_steps >= self._patience:
            self._idle_steps, self._patience = 0, min(2 * self._patience, _MAX_PATIENCE)

    def _hope(self, sequence: LiveSequence) -> Hope | None:
        most = min(self._most_tokens, room_of(sequence))
        kind = self._proposer.look(sequence) if most else None
        if kind is None:
            return None
        own = self._own.get(sequence)
        prior = self._overall[kind].given(_OPTIMISM)
        return Hope(sequence, kind, own[kind].given(prior) if own is not None else prior, most)

    def _wanted(self, hopes: Sequence[Hope], batch: int, is_early: bool) -> list[tuple[Hope, int]]:
        outlooks = [Outlook(hope.chance, hope.most, hope.chance if is_early else 1.0) for hope in hopes]
        counts = self._costs.allot(outlooks, batch, _MAX_SLOWDOWN)
        untried = [hope for hope, count in zip(hopes, counts, strict=True) if not count]
        for kind in {hope.kind for hope in untried}:
            self._overall[kind].fade()
        for hope in untried:
            if (own := self._own.get(hope.sequence)) is not None:
                own[hope.kind].fade()
        return [(hope, count) for hope, count in zip(hopes, counts, strict=True) if count]

    def _learn(self, request_id: str, num_held: int, count: int) -> None:
        hope = self._asked.get(request_id)
        if hope is None:
            return
        own = self._own.get(hope.sequence)
        if own is None:
            own = self._own[hope.sequence] = defaultdict(Chance)
        own[hope.kind].see(num_held, count)
        self._overall[hope.kind].see(num_held, count)
