"""The scheduler decides who runs. It deals in block ids and token counts; it has never seen a tensor, a socket or a
clock: time is an argument.

`plan` builds one step; `commit` takes its result. More steps may be planned between the two: a sequence whose newest
token is still in flight is planned with a placeholder, and what a later commit finds finished is dropped.
"""

from __future__ import annotations

from msgspec.structs import replace

from penstock.core.request import Priority, Request, TokenEvent
from penstock.kv.cache import BlockTable, KVCache, PrefixMatch
from penstock.sched import fast_forward as steady
from penstock.sched.budget import StepBudget, StepRoom
from penstock.sched.counters import SchedulerCounters
from penstock.sched.fairness import Share, Shares
from penstock.sched.guiding import TokenGuide
from penstock.sched.images import ImageSlots
from penstock.sched.lora import AdapterSlots
from penstock.sched.plan import Sampled, Slice, StepPlan, StepResult
from penstock.sched.queue import WaitingQueue
from penstock.sched.ranking import Rank, Ranking
from penstock.sched.sequence import Sequence
from penstock.sched.slicing import cost_of, take_slice, withdraw
from penstock.sched.speculation import drafting
from penstock.sched.speculation.drafting import Drafts

ADMISSION_SCAN = 64  # how deep to look past sequences that wait for a prefix another one is computing
_NO_DRAFTS: Drafts = {}
_LAST: Rank = (1 << 30, 0.0, 0)  # behind everybody


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
        adapters: AdapterSlots | None = None,
        num_batches: int = 1,
        images: ImageSlots | None = None,
    ) -> None:
        """`num_batches`: steps in flight that have no sequence in common, as many as a pipeline has stages."""
        self.num_batches = num_batches
        self.cache = cache
        self.budget = budget
        self.counters = SchedulerCounters()
        self._max_num_seqs = max_num_seqs
        self._patience_s = patience_s
        self._make_sequence = make_sequence
        self.adapters = adapters or AdapterSlots(0)
        self.images = images or ImageSlots()
        self._shares = Shares(max_num_seqs, cache.pool, self.counters, budget.tokens_beside(0))
        self._ranking = Ranking(aging_s, self._shares)
        self._waiting = WaitingQueue(self._ranking)
        self._running: list[Sequence] = []
        self._sequences: dict[str, Sequence] = {}
        self._pulling: set[Sequence] = set()  # they wait for blocks of another engine, and stand in nobody's way
        self._pulled: list[Sequence] = []  # they have their blocks, and wait for a place
        self.is_short = False  # somebody waits for blocks, by the last plan
        self._arrivals = 0
        self._gave_way: set[Sequence] = set()  # in the plan being made
        self._prefill_left = 0  # tokens of running sequences that the last plan left for later steps

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._pulling) + len(self._pulled)

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

    def submit(self, request: Request, now: float, guide: TokenGuide | None = None) -> Sequence:
        """Queue a request. It must fit the cache by itself: `prompt + max_tokens` was checked at the gateway."""
        assert request.id not in self._sequences
        assert len(request.prompt_ids) + request.max_tokens <= self.cache.capacity_tokens
        assert len(request.output_ids) < request.max_tokens
        self._arrivals += 1
        size = self.cache.pool.block_size
        sequence = self._make_sequence(request, arrival_s=now, order=self._arrivals, block_size=size)
        sequence.guide = guide
        self._sequences[request.id] = sequence
        self._shares.join(sequence)
        self._waiting.add(sequence)
        self.adapters.arrive(sequence)
        return sequence

    def abort(self, request_id: str) -> bool:
        """Forget a request, wherever it is. False if it had ended already."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        if sequence in self._pulling:
            self._pulling.remove(sequence)
        elif sequence in self._pulled:
            self._pulled.remove(sequence)
        elif sequence.table is None:
            self._waiting.remove(sequence)
        self._end(sequence)
        return True

    def set_aside(self, sequence: Sequence) -> None:
        """It has just come, and its blocks are on their way from another engine: others do not wait for it."""
        self._waiting.remove(sequence)
        self._pulling.add(sequence)

    def bring_back(self, sequence: Sequence) -> None:
        """Its pull has ended. It enters before all others if it has blocks of its own: memory that waits serves nobody.
        Else it has the place in the queue that it would have had."""
        self._pulling.remove(sequence)
        if sequence.pulled is not None:
            self._pulled.append(sequence)
        else:
            self._waiting.add(sequence)

    @property
    def decoding(self) -> list[Sequence]:
        """Sequences that drafts may help in the next step."""
        return drafting.decoding(self._running)

    @property
    def soon_decoding(self) -> list[Sequence]:
        """The same once the step in flight is read."""
        return drafting.decoding(self._running, once_read=True)

    def plan(self, now: float, drafts: Drafts = _NO_DRAFTS) -> StepPlan | None:
        """The next step, or None if nothing can run before a result is committed or a request arrives. `drafts` are
        tokens that may come next, of sequences that are decoding."""
        plan = StepPlan([])
        self.cache.poll(now)
        self._gave_way.clear()
        self._prefill_left = 0
        self.is_short = False
        if is_contested := self._shares.is_contested:
            self._ranking.look(self._sequences, now)
        self._running.sort(key=lambda s: self._ranking.rank(s, now))
        decodes = [s for s in self._running if s.num_wanted == 1 and not s.must_wait]
        prefills = [s for s in self._running if s.num_wanted > 1 and not s.must_wait]
        if self.num_batches > 1:
            decodes, prefills = self._batch(decodes), [s for s in prefills if not s.num_in_flight]
        room = self.budget.room_beside(len(decodes))
        self.images.begin(room.left(goes_first=False) if decodes else None)
        yielding = self._yielding(decodes, now) if prefills or self._waiting else {}
        for sequence in decodes:  # they always go: prefill never blocks them
            if sequence.request.id not in yielding:
                self._extend(plan, sequence, 1, now)
        if prefills or self._is_overdue(now):
            room.widen(self.budget.floor)
        for place, sequence in enumerate(prefills):
            if (is_contested and place == 0) or self._waiting.has_resumed:
                # A tenant whose turn it is does not wait for another's prompt to end, nor does a resumed stream.
                self._admit(plan, room, now, ahead_of=self._ranking.rank(sequence, now))
            left = room.left(goes_first=self._ranking.goes_first(sequence, now))
            room.take(self._extend(plan, sequence, min(sequence.num_wanted, left), now))
        self._prefill_left += sum(s.num_wanted for s in prefills if s.table is not None and s.num_wanted > 1)
        if is_contested or not self._gave_way:  # else memory is short: who gave way now stays out for a step
            self._admit(plan, room, now)
        if yielding and not self._computes_prompts(plan, now):
            for sequence in yielding.values():
                self._extend(plan, sequence, 1, now)
        if drafts and not self._gave_way:
            drafting.attach(plan, drafts, self._sequences, self.budget.tokens_beside(len(plan.slices)))
        self.is_short |= bool(self._gave_way)
        plan.copies.extend(self.cache.pool.take_moves() if plan.slices else ())
        if self.cache.states is not None and plan.slices:
            plan.state_copies.extend(self.cache.states.take_moves())
        return self._with_images(self.adapters.placed(plan)) if plan.slices else None

    def _with_images(self, plan: StepPlan) -> StepPlan:
        encodes, drops = self.images.take()
        return replace(plan, encodes=encodes, drops=drops) if encodes or drops else plan

    def _yielding(self, decodes: list[Sequence], now: float) -> dict[str, Sequence]:
        """Decodes of the lowest class, by id: they take no part in a step that computes prompts of higher ones, whose
        time to first token they would lengthen. Age ends that, so that nobody stands still for long."""
        return {s.request.id: s for s in decodes if self._ranking.yields(s, now)}

    def _computes_prompts(self, plan: StepPlan, now: float) -> bool:
        """Whether the plan has prompts of classes above the lowest."""
        sequences = (self._sequences[planned.request_id] for planned in plan.slices if planned.num_tokens > 1)
        return any(self._ranking.level(sequence, now) < Priority.LOW for sequence in sequences)

    def _batch(self, decodes: list[Sequence]) -> list[Sequence]:
        """This step's part of those who decode: others' tokens are in flight, or go with the next step."""
        most = -(-len(decodes) // self.num_batches)
        return [s for s in decodes if not s.num_in_flight][:most]

    def _is_overdue(self, now: float) -> bool:
        return any(now - first.arrival_s >= self._patience_s for first in self._waiting.first(1, now))

    def _extend(self, plan: StepPlan, sequence: Sequence, count: int, now: float) -> int:
        """Plan `count` tokens of a running sequence, at the price of those that rank behind it; how many went in."""
        if sequence.table is None or sequence.is_settled or count <= 0:
            return 0  # preempted by one before it, or done once its token is read, or the step is full
        if sequence.request.images:
            count = self.images.reach(sequence.request.images, sequence.num_computed, count)
            if not count:
                return 0  # its next image is encoded in a later step
        count = sequence.table.reach(sequence.num_computed, count)
        while not sequence.table.grow(sequence.num_computed + count):
            victim = self._ranking.last(self._running, now)
            self._preempt(plan, victim)
            if victim is sequence:
                return 0
        self._add(plan, sequence, count)
        return count

    def _admit(self, plan: StepPlan, room: StepRoom, now: float, ahead_of: Rank = _LAST) -> None:
        """Let waiting sequences in, best first, while there are tokens, places, blocks and adapters for them. First
        come, first served: nobody overtakes for being small, but others' claims stand. No new one begins while a
        resumed stream waits for a prefix that is being computed."""
        self.adapters.begin()
        self._admit_pulled(plan, room, now)
        is_short, blocked, is_held = bool(self._gave_way), set[Share](), False
        for sequence in self._waiting.first(ADMISSION_SCAN, now):
            if self._ranking.rank(sequence, now) > ahead_of:
                break
            goes_first = self._ranking.goes_first(sequence, now)
            if room.left(goes_first=goes_first) <= 0 or (is_held and not goes_first):
                if self._waiting.has_resumed and room.left(goes_first=True) > 0:
                    continue  # of a lower class, perhaps, but they have room of their own
                break
            if sequence.num_in_flight or sequence.must_wait or sequence.share in blocked or sequence in self._gave_way:
                continue  # its own last token is being computed, or its guide is being made
            if not self.adapters.lets_in(sequence, now):
                continue
            match = self.cache.match(sequence.hashes, sequence.token_ids, limit=len(sequence.token_ids) - 1)
            if match.is_pending:
                is_held |= goes_first and not self._pulling  # else it may be pulled, and nobody knows for how long
                continue  # its prefix is being computed: waiting a step beats repeating it
            if self._fetches(sequence, match, now):
                is_held |= goes_first
                continue  # its prefix is being read from disk
            if sequence.request.images and not self.images.has_room(sequence.request.images, match.num_tokens):
                continue  # of a later step: others go on beside it
            may_enter = not is_short or self._shares.have_room_for(sequence)
            table = self._find_room(plan, sequence, match, now) if may_enter else None
            if table is None:
                is_short = True
                blocked.add(sequence.share)
                if not self._shares.is_contested:
                    break
                continue
            self._waiting.remove(sequence)
            self._enter(sequence, table, match.num_tokens, now)
            self._add_first(plan, room, sequence, now)

    def _add_first(self, plan: StepPlan, room: StepRoom, sequence: Sequence, now: float) -> None:
        """The first slice of a sequence that has entered."""
        goes_first = self._ranking.goes_first(sequence, now)
        count = min(sequence.num_wanted, room.left(goes_first=goes_first))
        if sequence.request.images:
            count = self.images.reach(sequence.request.images, sequence.num_computed, count)
        assert sequence.table is not None
        count = sequence.table.reach(sequence.num_computed, count)
        planned = self._add(plan, sequence, count)
        room.take(planned.num_tokens)
        if planned.sample is None:
            self._prefill_left += sequence.num_wanted

    def _admit_pulled(self, plan: StepPlan, room: StepRoom, now: float) -> None:
        """Let sequences in that have their blocks already, best first, while there are tokens and places for them."""
        for sequence in sorted(self._pulled, key=lambda s: self._ranking.rank(s, now)):
            if room.left(goes_first=self._ranking.goes_first(sequence, now)) <= 0:
                return
            if sequence.must_wait or not self.adapters.lets_in(sequence, now):
                continue
            assert sequence.pulled is not None
            if not self.images.has_room(sequence.request.images, sequence.pulled[1]):
                continue
            if len(self._running) >= self._max_num_seqs and not self._displace(plan, sequence, now, by_place=True):
                return
            (table, num_tokens), sequence.pulled = sequence.pulled, None
            self._pulled.remove(sequence)
            self._enter(sequence, table, num_tokens, now)
            self._add_first(plan, room, sequence, now)

    def _fetches(self, sequence: Sequence, match: PrefixMatch, now: float) -> bool:
        """Have more of its prefix read from disk, once: it does not wait for the same blocks again and again."""
        if not match.num_beyond or sequence.has_fetched:
            return False
        sequence.has_fetched = self.cache.fetch(match, sequence.hashes, now)
        return sequence.has_fetched

    def _find_room(self, plan: StepPlan, sequence: Sequence, match: PrefixMatch, now: float) -> BlockTable | None:
        """Blocks for all the tokens of a waiting sequence, so that it can always finish its prompt. A block of headroom
        per running sequence is left, so that the newcomer is not preempted in the very next step."""
        if len(self._running) >= self._max_num_seqs and not self._displace(plan, sequence, now, by_place=True):
            return None
        tokens, hashes = sequence.token_ids, sequence.hashes
        while True:
            reserve = min(len(self._running), self.cache.pool.num_blocks // 8)
            table = self.cache.acquire(match, len(tokens), hashes, tokens, reserve=reserve)
            if table is not None or not self._displace(plan, sequence, now):
                self.is_short |= table is None
                return table

    def _enter(self, sequence: Sequence, table: BlockTable, num_cached: int, now: float) -> None:
        self._running.append(sequence)
        sequence.table = table
        sequence.num_computed = num_cached
        self.adapters.enter(sequence)
        self._shares.enter(sequence)
        if sequence.first_run_s is None:
            sequence.first_run_s = now
            num_cached = max(0, num_cached - sequence.num_computed_elsewhere)
            sequence.num_cached = min(num_cached, sequence.prompt_len)
            self.counters.prompt_tokens += len(sequence.token_ids)
            self.counters.cached_tokens += num_cached
        else:
            self.counters.recomputed_tokens += max(0, sequence.num_lost - num_cached)

    def _displace(self, plan: StepPlan, newcomer: Sequence, now: float, *, by_place: bool = False) -> bool:
        """Preempt a running sequence that must give way to the newcomer, if there is one."""
        victim = self._ranking.displaced(newcomer, self._running, now, by_place=by_place)
        if victim is not None:
            self._preempt(plan, victim)
        return victim is not None

    def _preempt(self, plan: StepPlan, victim: Sequence) -> None:
        """Take a sequence's blocks, and its place in the plan being made; it waits where it came from."""
        self._shares.charge(victim, -withdraw(plan, victim))
        victim.preempt()
        self.adapters.exit(victim)
        self._shares.exit(victim)
        self._running.remove(victim)
        self._waiting.add(victim)
        self._gave_way.add(victim)
        self.counters.preemptions += 1

    def _add(self, plan: StepPlan, sequence: Sequence, count: int) -> Slice:
        planned = take_slice(sequence, count)
        plan.slices.append(planned)
        if self._shares.is_contested:
            self._shares.charge(sequence, cost_of(planned))
        return planned

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        """Take a step's tokens; publish what it completed; return the news for each client."""
        events = []
        self.cache.settle(plan.copies)
        for planned, sampled in zip(plan.slices, result.sampled, strict=True):
            sequence = self._sequences.get(planned.request_id)
            if sequence is None:
                continue  # aborted or finished while the step ran: its tokens are retracted
            if planned.epoch == sequence.epoch and sequence.table is not None:
                sequence.table.publish(sequence.hashes, sequence.token_ids, planned.end)
            if sampled is not None and planned.end == len(sequence.token_ids):
                events.append(self._take(sequence, sampled, now))  # else its place is taken: see guiding
                if planned.ahead:
                    self.counters.drafted_tokens += len(planned.ahead)
                    self.counters.accepted_tokens += drafting.keep(sequence, planned)
        return events

    def _take(self, sequence: Sequence, sampled: Sampled, now: float) -> TokenEvent:
        sequence.num_in_flight -= 1
        is_first = not sequence.has_begun
        taken, finish, error, error_code = sequence.take(sampled.token_ids)
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
            timings=sequence.timings(now) if is_first else None,
            error=error,
            error_code=error_code,
        )

    @property
    def steady_steps(self) -> int:
        """Number of next steps that cannot change what is decided, while no request comes or goes: `fast_forward`."""
        return 0 if self._waiting or self._pulled else steady.num_steps(self._running, self.cache.pool)

    def take_steady(self, count: int, token_id: int) -> None:
        """Plan and commit `count` of those at once."""
        steady.advance(self._running, count, token_id, self._shares)
        self.counters.generated_tokens += count * len(self._running)

    def _end(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request.id]
        self._shares.leave(sequence)
        if sequence.table is not None:
            sequence.table.release()
            sequence.table = None
            self._running.remove(sequence)
        elif sequence.pulled is not None:
            sequence.pulled[0].release()
            sequence.pulled = None
        self.adapters.leave(sequence)
        if not self._running:
            self._prefill_left = 0
