"""The scheduler decides who runs. It deals in block ids and token counts; it has never seen a tensor, a socket or a
clock: time is an argument.

`plan` builds one step; `commit` takes its result. Between the two, more steps may be planned: a sequence whose newest
token is still in flight is planned with a placeholder, and what a later commit finds finished is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.request import Request, RequestTimings, TokenEvent
from penstock.kv.cache import BlockTable, KVCache, PrefixMatch
from penstock.sched import steady
from penstock.sched.budget import StepBudget
from penstock.sched.guiding import TokenGuide
from penstock.sched.plan import Sampled, SampleSpec, Slice, StepPlan, StepResult
from penstock.sched.queue import Ranking, WaitingQueue
from penstock.sched.sequence import Sequence

ADMISSION_SCAN = 64  # how deep to look past sequences that wait for a prefix another one is computing


@dataclass
class SchedulerCounters:
    """Facts since the start, for whoever publishes them."""

    preemptions: int = 0
    prompt_tokens: int = 0  # of sequences that were let in for the first time, output made elsewhere included
    cached_tokens: int = 0  # of those, found in the prefix cache
    generated_tokens: int = 0
    forced_tokens: int = 0  # of those, by a guide: nobody chose them
    recomputed_tokens: int = 0  # that a sequence had before it was preempted, and that the cache had lost


class Scheduler:
    def __init__(
        self,
        cache: KVCache,
        budget: StepBudget,
        *,
        max_num_seqs: int,
        patience_s: float = 0.2,  # how long the first in the queue is held back for the sake of those that run
        aging_s: float = 10.0,
        make_sequence: type[Sequence] = Sequence,
    ) -> None:
        self.cache = cache
        self.budget = budget
        self.counters = SchedulerCounters()
        self._max_num_seqs = max_num_seqs
        self._patience_s = patience_s
        self._make_sequence = make_sequence
        self._ranking = Ranking(aging_s)
        self._waiting = WaitingQueue(self._ranking)
        self._running: list[Sequence] = []
        self._sequences: dict[str, Sequence] = {}
        self._arrivals = 0
        self._prefill_left = 0  # tokens of running sequences that the last plan left for later steps

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def queued_tokens(self) -> int:
        """Known and not planned yet: what a newcomer would stand behind."""
        return self._waiting.num_tokens + self._prefill_left

    @property
    def fragmentation(self) -> float:
        """The share of the room in running sequences' blocks that has no token in it."""
        room = sum(len(s.table.block_ids) for s in self._running if s.table is not None) * self.cache.pool.block_size
        return max(0.0, 1.0 - sum(s.num_computed for s in self._running) / room) if room else 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def submit(self, request: Request, now: float, guide: TokenGuide | None = None) -> None:
        """Queue a request. It must fit the cache by itself: `prompt + max_tokens` was checked at the door."""
        assert request.id not in self._sequences
        assert len(request.prompt_ids) + request.max_tokens <= self.cache.capacity_tokens
        assert len(request.output_ids) < request.max_tokens
        self._arrivals += 1
        size = self.cache.pool.block_size
        sequence = self._make_sequence(request, arrival_s=now, order=self._arrivals, block_size=size)
        sequence.guide = guide
        self._sequences[request.id] = sequence
        self._waiting.add(sequence)

    def abort(self, request_id: str) -> bool:
        """Forget a request, wherever it is. False if it had ended already."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        if sequence.table is None:
            self._waiting.remove(sequence)
        self._end(sequence)
        return True

    # -- deciding ----------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can run before a result is committed or a request arrives."""
        plan = StepPlan([])
        self._running.sort(key=lambda s: self._ranking.rank(s, now))
        decodes = [s for s in self._running if s.num_wanted == 1 and not s.must_wait]
        prefills = [s for s in self._running if s.num_wanted > 1 and not s.must_wait]
        preemptions = self.counters.preemptions
        left = self.budget.tokens_beside(len(decodes))
        for sequence in decodes:  # they always go: prefill never blocks them
            self._extend(plan, sequence, 1, now)
        if prefills or self._is_overdue(now):
            left = max(left, self.budget.floor)
        for sequence in prefills:
            left -= self._extend(plan, sequence, min(sequence.num_wanted, left), now)
        self._prefill_left = sum(s.num_wanted for s in prefills if s.table is not None and s.num_wanted > 1)
        if self.counters.preemptions == preemptions:  # else memory is short: who gave way now stays out for a step
            self._admit(plan, left, now)
        return plan if plan.slices else None

    def _is_overdue(self, now: float) -> bool:
        return any(now - first.arrival_s >= self._patience_s for first in self._waiting.first(1, now))

    def _extend(self, plan: StepPlan, sequence: Sequence, count: int, now: float) -> int:
        """Plan `count` tokens of a running sequence, at the price of those that rank behind it; how many went in."""
        if sequence.table is None or sequence.is_settled or count <= 0:
            return 0  # preempted by one before it, or done once its token is read, or the step is full
        while not sequence.table.grow(sequence.num_computed + count):
            victim = max(self._running, key=lambda s: self._ranking.rank(s, now))
            self._preempt(plan, victim)
            if victim is sequence:
                return 0
        plan.slices.append(self._slice(sequence, count))
        return count

    def _admit(self, plan: StepPlan, left: int, now: float) -> None:
        """Let waiting sequences in, best first, while there are tokens, places and blocks for them."""
        for sequence in self._waiting.first(ADMISSION_SCAN, now):
            if left <= 0:
                return
            if sequence.num_in_flight or sequence.must_wait:
                continue  # its own last token is being computed, or its guide is being made
            match = self.cache.match(sequence.hashes, sequence.token_ids, limit=len(sequence.token_ids) - 1)
            if match.is_pending:
                continue  # its prefix is being computed: waiting a step beats repeating it
            if len(self._running) >= self._max_num_seqs and not self._displace(plan, sequence, now):
                return
            table = self._acquire(sequence, match)
            while table is None and self._displace(plan, sequence, now):
                table = self._acquire(sequence, match)
            if table is None:
                return  # first come, first served: nobody overtakes for being small
            if match.partial_block is not None:
                plan.copies.append((match.partial_block, table.block_ids[len(match.block_ids)]))
            self._enter(sequence, table, match.num_tokens, now)
            count = min(sequence.num_wanted, left)
            plan.slices.append(self._slice(sequence, count))
            left -= count
            if plan.slices[-1].sample is None:
                self._prefill_left += sequence.num_wanted

    def _acquire(self, sequence: Sequence, match: PrefixMatch) -> BlockTable | None:
        """Blocks for all the tokens of a waiting sequence: one that is let in can always finish its prompt.

        A block of headroom per running sequence is left, so that the newcomer is not preempted in the very next step.
        """
        reserve = min(len(self._running), self.cache.pool.num_blocks // 8)
        return self.cache.acquire(match, len(sequence.token_ids), sequence.hashes, reserve=reserve)

    def _enter(self, sequence: Sequence, table: BlockTable, num_cached: int, now: float) -> None:
        self._waiting.remove(sequence)
        self._running.append(sequence)
        sequence.table = table
        sequence.num_computed = num_cached
        if sequence.first_run_s is None:
            sequence.first_run_s = now
            sequence.num_cached = min(num_cached, sequence.prompt_len)
            self.counters.prompt_tokens += len(sequence.token_ids)
            self.counters.cached_tokens += num_cached
        else:
            self.counters.recomputed_tokens += max(0, sequence.num_lost - num_cached)

    def _displace(self, plan: StepPlan, newcomer: Sequence, now: float) -> bool:
        """Preempt a running sequence of a lower class than the newcomer's, if there is one."""
        victim = max(self._running, key=lambda s: self._ranking.rank(s, now), default=None)
        if victim is None or self._ranking.level(victim, now) <= self._ranking.level(newcomer, now):
            return False
        self._preempt(plan, victim)
        return True

    def _preempt(self, plan: StepPlan, victim: Sequence) -> None:
        """Take a sequence's blocks, and its place in the plan being made; it waits where it came from."""
        for index, planned in enumerate(plan.slices):
            if planned.request_id == victim.request.id:
                victim.num_in_flight -= planned.sample is not None
                del plan.slices[index]
                break
        victim.preempt()
        self._running.remove(victim)
        self._waiting.add(victim)
        self.counters.preemptions += 1

    def _slice(self, sequence: Sequence, count: int) -> Slice:
        assert sequence.table is not None
        start = sequence.num_computed
        end = start + count
        known = len(sequence.token_ids)
        sample = self._sample_spec(sequence) if end == known + sequence.num_in_flight else None
        sliced = Slice(
            request_id=sequence.request.id,
            start=start,
            num_tokens=count,
            token_ids=sequence.token_ids[start : min(end, known)],
            block_ids=sequence.table.block_ids,
            sample=sample,
            epoch=sequence.epoch,
        )
        sequence.num_computed = end
        if sample is not None:
            sequence.num_in_flight += 1
        return sliced

    def _sample_spec(self, sequence: Sequence) -> SampleSpec:
        request, guide = sequence.request, sequence.guide
        generated = sequence.num_generated + sequence.num_in_flight
        return SampleSpec(
            params=request.sampling,
            history=sequence.token_ids,
            prompt_len=sequence.prompt_len,
            position=sequence.prompt_len + generated,
            banned_ids=request.stop_token_ids if generated < request.min_tokens and guide is None else (),
            mask=guide,
        )

    # -- recording ---------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        """Take a step's tokens; publish what it completed; return the news for each client."""
        events = []
        for planned, sampled in zip(plan.slices, result.sampled, strict=True):
            sequence = self._sequences.get(planned.request_id)
            if sequence is None:
                continue  # aborted or finished while the step ran: its tokens are retracted
            if planned.epoch == sequence.epoch and sequence.table is not None:
                done = planned.start + planned.num_tokens
                sequence.table.publish(sequence.hashes, sequence.token_ids, done)
            if sampled is not None and planned.start + planned.num_tokens == len(sequence.token_ids):
                events.append(self._take(sequence, sampled, now))  # else its place is taken: see guiding
        return events

    def _take(self, sequence: Sequence, sampled: Sampled, now: float) -> TokenEvent:
        sequence.num_in_flight -= 1
        is_first = not sequence.has_begun
        taken, finish, error = sequence.take(sampled.token_ids)
        if len(taken) > len(sampled.token_ids):
            sequence.num_in_flight = 0  # what is in flight was chosen for the place of a forced token
            self.counters.forced_tokens += len(taken) - len(sampled.token_ids)
        sequence.hashes.extend(sequence.token_ids)
        self.counters.generated_tokens += len(taken)
        if finish is not None:
            if sequence.table is None:
                self._waiting.remove(sequence)
            self._end(sequence)
        return TokenEvent(
            request_id=sequence.request.id,
            token_ids=taken,
            finish=finish,
            logprobs=sampled.logprobs[: len(taken)] if sampled.logprobs is not None else None,
            cached_tokens=sequence.num_cached if is_first else None,
            timings=self._timings(sequence, now) if is_first else None,
            error=error,
        )

    @property
    def steady_steps(self) -> int:
        """How many of the next steps cannot change what is decided, while no request comes or goes; see `steady`."""
        return 0 if self._waiting else steady.num_steps(self._running, self.cache.pool)

    def take_steady(self, count: int, token_id: int) -> None:
        """Plan and commit `count` of those at once."""
        steady.advance(self._running, count, token_id)
        self.counters.generated_tokens += count * len(self._running)

    @staticmethod
    def _timings(sequence: Sequence, now: float) -> RequestTimings:
        assert sequence.first_run_s is not None
        return RequestTimings(sequence.first_run_s - sequence.arrival_s, now - sequence.first_run_s)

    def _end(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request.id]
        if sequence.table is not None:
            sequence.table.release()
            sequence.table = None
            self._running.remove(sequence)
        if not self._running:
            self._prefill_left = 0
