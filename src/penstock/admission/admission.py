"""Admission: the one decision at the gateway. It knows the replicas' room, the queues and the expected TTFT; what a
tenant may spend is settled before.

    decision = admission.submit(request, now)              # Admit, Queued or Shed
    admission.started(id, now)                             # its first token came
    admission.finished(id, now, used)                      # for any reason, once
    for decision in admission.poll(now): ...               # what became possible, what ran out of time

Call `poll` after events and when `next_deadline` comes. Nothing here reads a clock or touches a socket.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from penstock.admission.decision import Admit, Decision, Queued, Shed, ShedReason
from penstock.admission.expected import Expected
from penstock.admission.ledger import Entry, cost, expected_cost
from penstock.admission.loads import ReplicaLoads
from penstock.admission.queue import Line, ModelQueue, Waiting
from penstock.admission.refusal import (
    MIN_RETRY_S,
    NOT_LOADED_RETRY_S,
    dead_end,
    first_guess,
    retry_after_s,
    why_not_wait,
)
from penstock.admission.settings import AdmissionSettings
from penstock.admission.shares import FAIR_SHARE, Shares, blocked_by
from penstock.core.replica import ReplicaSnapshot, ReplicaState
from penstock.core.request import Priority
from penstock.core.slo import Slo
from penstock.router.legs import SourceReason
from penstock.router.load import expected_ttft_s
from penstock.router.request import EdgeRequest
from penstock.router.router import Choice, Router

_WORKING = (ReplicaState.READY, ReplicaState.DEGRADED)
_SCAN = 64  # how many blocked lines to look past
_SOON_S = 0.5  # who comes back this much too early is let in


class Used(msgspec.Struct, frozen=True, gc=False):
    """The tokens that a request really took."""

    prompt_tokens: int
    output_tokens: int


class _Model:
    def __init__(self, settings: AdmissionSettings, slo: Slo) -> None:
        self.queue = ModelQueue(settings)
        self.shares = Shares(settings)
        self.slo = slo


class Admission:
    def __init__(
        self,
        router: Router | None = None,
        settings: AdmissionSettings | None = None,
        slos: Mapping[str, Slo] | None = None,
    ) -> None:
        """`slos`: by model; what is not named has the defaults."""
        self.router = router or Router()
        self._settings, self._slos = settings or AdmissionSettings(), slos or {}
        self._holds: Mapping[str, float] = {}
        self._expected: Mapping[str, Expected] = {}
        self._loads = ReplicaLoads()
        self._ledger: dict[str, Entry] = {}  # of admitted requests, until they are finished
        self._models: dict[str, _Model] = {}
        self._deadlines: list[tuple[float, str, str]] = []  # deadline, request, model
        self._news: list[Decision] = []

    def configure(self, slos: Mapping[str, Slo], holds: Mapping[str, float]) -> None:
        """Takes objectives by model, and for how many seconds requests of a model wait where no replica is ready; what
        is not in `holds` is refused at once then."""
        self._slos, self._holds = slos, holds
        for name, model in self._models.items():
            model.slo = slos.get(name, Slo())

    def expect(self, expected: Mapping[str, Expected], now: float) -> None:
        """Takes what controllers say of their models' next replicas. Those who wait for one that comes later than they
        can wait are refused, with the new time, and so are those who wait for one that will not come; `poll` tells."""
        self._expected = expected
        for name, model in self._models.items():
            if not model.queue or name not in expected or self.has_active(name, now):
                continue
            for item in list(model.queue.items):
                eta_s, refusal = self.eta_s(name, now, item.since), expected[name].refusal
                if refusal:
                    self._give_up(model.queue, item.request.id, ShedReason.NOT_LOADED, now, refusal)
                elif eta_s is not None and now + eta_s > item.deadline:
                    self._give_up(model.queue, item.request.id, ShedReason.NO_REPLICA, now)

    def eta_s(self, model: str, now: float, since: float | None = None) -> float | None:
        """Seconds until a model without an active replica has one, for a request that waits `since` then, or comes now;
        None: nobody says."""
        expected = self._expected.get(model)
        if expected is None or now > expected.until:
            return None
        return expected.eta_s(now if since is None else since, now)

    def hold_s(self, model: str, now: float) -> float:
        """Returns how long requests may wait for a replica that a controller starts; 0: none does."""
        expected = self._expected.get(model)
        return expected.hold_s if expected is not None and now <= expected.until else 0.0

    def managed(self, now: float) -> set[str]:
        """Models whose replicas a controller keeps."""
        return {name for name, expected in self._expected.items() if now <= expected.until}

    def can_hold(self, now: float) -> bool:
        """Whether there is a model whose requests wait for a replica that a controller starts."""
        return any(now <= expected.until and expected.hold_s > 0 for expected in self._expected.values())

    @property
    def num_open(self) -> int:
        return len(self._ledger)

    def num_waiting(self, model: str, priority: Priority | None = None) -> int:
        found = self._models.get(model)
        if found is None:
            return 0
        return len(found.queue) if priority is None else found.queue.length(priority)

    def waiting(self, model: str) -> Collection[Waiting]:
        found = self._models.get(model)
        return found.queue.items if found is not None else ()

    def slo(self, model: str) -> Slo:
        return self._slos.get(model) or Slo()

    @property
    def waiting_models(self) -> set[str]:
        """Models that requests wait for."""
        return {name for name, model in self._models.items() if model.queue}

    @property
    def next_deadline(self) -> float | None:
        """Returns when `poll` has something to do though nothing happens. May be early, never late."""
        return self._deadlines[0][0] if self._deadlines else None

    # -- replicas ----------------------------------------------------------------------------------------------------

    def replica_changed(self, snapshot: ReplicaSnapshot) -> None:
        self._loads.update(snapshot)

    def replica_gone(self, replica_id: str) -> None:
        self._loads.remove(replica_id)

    def replicas(self, model: str) -> Sequence[ReplicaSnapshot]:
        """Returns what is believed of the replicas now, this gateway's own traffic included."""
        return self._loads.of_model(model)

    def has_active(self, model: str, now: float) -> bool:
        """Whether a replica of it takes work now."""
        return any(one.state_at(now) in _WORKING and not one.is_tripped for one in self._loads.of_model(model))

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(self, request: EdgeRequest, now: float) -> Decision:
        model = self._models.get(request.model)
        if model is None:
            model = self._models[request.model] = _Model(self._settings, self._slos.get(request.model, Slo()))
        replicas = self._loads.of_model(request.model)
        usable, dropped = self.router.usable(request, replicas, now)
        if not usable:
            shed = dead_end(request, replicas, dropped)
            return self._hold(model, shed, now) if shed.reason is ShedReason.NO_REPLICA else shed
        model.shares.seen(request, now)
        if not model.queue:
            choice = self._choose(request, usable, now, model.shares.ceiling(request, now), dropped)
            if choice is not None:
                model.queue.redeem(request)
                model.queue.charge(request, expected_cost(request))
                return self._admit(model, request, choice, now, now)
        return self._wait(model, request, usable, now)

    def started(self, request_id: str, now: float) -> None:
        """Its first token came: its prompt is no longer in front of anyone."""
        entry = self._ledger.get(request_id)
        if entry is not None and entry.started_at is None:
            counted = _prefill_counted(entry, entry.sent_tokens, self._loads.base(entry.replica_id))
            self._loads.change(entry.replica_id, now, 0, -counted, 0)
            if entry.source_id:
                self._leave_source(entry, now)
            entry.started_at = now

    def finished(self, request_id: str, now: float, used: Used | None = None) -> Entry | None:
        """A request is over: done, failed, or its client gone, waiting or not. The entry to settle, the first time.

        Without `used` it counts, for fairness, as having taken all that it might have.
        """
        entry = self._ledger.pop(request_id, None)
        if entry is None:
            for model in self._models.values():
                model.queue.remove(request_id)
            return None
        request, model = entry.request, self._models[entry.request.model]
        self._leave_replica(entry, now, used)
        model.shares.release(request.tenant)
        if used is not None:
            model.queue.settle(request, cost(used.prompt_tokens, used.output_tokens) - expected_cost(request))
        return entry

    def reroute(
        self,
        request_id: str,
        now: float,
        avoid: frozenset[str],
        known_tokens: int,
        *,
        is_begun: bool = False,
        origin: str = "",
    ) -> Choice | None:
        """Another replica for an admitted request, before or after its first token; None: there is none.

        It does not wait again: it was let in once, and goes to the best of those with room, or else of all. One that
        has begun goes to a replica whose breaker is open rather than nowhere: that may fail, an end surely does.
        `origin`: the replica that has made `known_tokens` of it; if that drains, their KV is pulled from there.
        """
        entry = self._ledger.get(request_id)
        if entry is None:
            return None
        request = replace(entry.request, avoid=avoid)
        replicas = self._loads.of_model(request.model)
        usable, dropped = self.router.usable(request, replicas, now)
        if not usable and is_begun:
            replicas = [replace(replica, is_tripped=False) for replica in replicas]
            usable, dropped = self.router.usable(request, replicas, now)
        choice = self._choose(request, usable, now, 1.0, {}) or self.router.pick_among(request, usable, now, dropped)
        if choice.replica is None:
            return None
        self._leave_replica(entry, now, None)
        if choice.replica.kv_address:
            self._add_source(request, choice, now)
        if is_begun and (moved_from := self._loads.base(origin)) is not None:
            self.router.add_origin(request, choice, moved_from, known_tokens)
        entry.replica_id, entry.sent_at = choice.replica.id, now
        entry.sent_tokens, entry.started_at = _prefill_tokens(choice, known_tokens, request.prompt_tokens), None
        self._send(entry, choice, now)
        return choice

    def has_other(self, request_id: str, now: float, avoid: frozenset[str]) -> bool:
        """Whether a replica that is not to be avoided could take over an admitted request."""
        entry = self._ledger.get(request_id)
        if entry is None:
            return False
        request = replace(entry.request, avoid=avoid)
        return bool(self.router.usable(request, self._loads.of_model(request.model), now)[0])

    def poll(self, now: float) -> list[Decision]:
        """Returns what was decided since the last call about requests that wait."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id, name = heapq.heappop(self._deadlines)
            has_replica = any(replica.state_at(now) in _WORKING for replica in self._loads.of_model(name))
            reason = ShedReason.DEADLINE if has_replica else ShedReason.NO_REPLICA
            self._give_up(self._models[name].queue, request_id, reason, now)
        for model in self._models.values():
            model.queue.expire_promises(now)
            if model.queue:
                self._dispatch(model, now)
        news, self._news = self._news, []
        return news

    # -- deciding ----------------------------------------------------------------------------------------------------

    def _choose(
        self,
        request: EdgeRequest,
        usable: Sequence[ReplicaSnapshot],
        now: float,
        ceiling: float,
        dropped: dict[str, str],
    ) -> Choice | None:
        """A pick among the replicas with room; None: none has room."""
        if not usable:
            return None
        places_kept = self._models[request.model].shares.places_kept(request.tenant, len(usable))
        some = self.router.narrowed(request, usable, now)
        for looked_at in (some, usable) if some is not usable else (usable,):  # at all of very many only if need be
            saved, free = self.router.saved_tokens(request, looked_at, now), looked_at
            for replica in looked_at:
                if replica.sequences:  # who fits a replica at all fits an empty one
                    reason = blocked_by(request, replica, ceiling, places_kept, saved.get(replica.id, 0))
                    if reason is not None:
                        dropped[replica.id], free = reason, ()
            if free is not looked_at:
                free = [replica for replica in looked_at if replica.id not in dropped]
            if free:
                return self.router.pick_among(request, free, now, dropped)
        return self._choose_split(request, usable, now, ceiling, places_kept, dropped)

    def _choose_split(
        self,
        request: EdgeRequest,
        usable: Sequence[ReplicaSnapshot],
        now: float,
        ceiling: float,
        places_kept: float,
        dropped: dict[str, str],
    ) -> Choice | None:
        """A pick among replicas that have room for the answer, and prompts enough in front of this one, if another
        computes it; None: none does."""
        crowded = [
            one
            for one in usable
            if one.kv_address
            and dropped.get(one.id) == "prefill"
            and blocked_by(request, one, ceiling, places_kept, one.prefill_queued) is None
        ]
        if not crowded:
            return None
        choice = self.router.pick_among(request, crowded, now, dropped)
        self._add_source(request, choice, now)
        if choice.source is None or not choice.source.prefills:
            return None
        for one in crowded:
            del dropped[one.id]
        return choice

    def _dispatch(self, model: _Model, now: float) -> None:
        """Send what has room, in order. A line that is held back for the sake of others is looked past; at one that
        finds the replicas really full everybody stops, so that nobody overtakes for being small."""
        queue, blocked = model.queue, set[Line]()
        while len(blocked) < _SCAN and (item := queue.next(now, blocked)) is not None:
            request = item.request
            ceiling = 1.0 if queue.is_overdue(item, now) else model.shares.ceiling(request, now)
            usable, dropped = self.router.usable(request, self._loads.of_model(request.model), now)
            choice = self._choose(request, usable, now, ceiling, dropped)
            if choice is not None:
                queue.give(item, now)
                self._news.append(self._admit(model, request, choice, item.since, now))
            elif not usable or ceiling < 1.0 or request.allowed is not None or FAIR_SHARE in dropped.values():
                blocked.add(queue.line(request))
            else:
                return

    def _admit(self, model: _Model, request: EdgeRequest, choice: Choice, since: float, now: float) -> Admit:
        assert choice.replica is not None
        if choice.replica.kv_address:
            self._add_source(request, choice, now)
        replica, source = choice.replica, choice.source
        tokens = _prefill_tokens(choice, request.prompt_tokens, request.prompt_tokens)
        waited_s = now - since
        sent_s = expected_ttft_s(request, replica, choice.saved_tokens) if source is None else source.ttft_s
        ttft_s = waited_s + sent_s
        entry = Entry(request, replica.id, now, ttft_s, now, tokens)
        assert request.id not in self._ledger
        self._ledger[request.id] = entry
        self._send(entry, choice, now)
        model.shares.hold(request.tenant)
        return Admit(request, choice, replica.id, waited_s, ttft_s)

    def _wait(self, model: _Model, request: EdgeRequest, usable: Sequence[ReplicaSnapshot], now: float) -> Decision:
        """Puts a request into the queue, unless that makes no sense."""
        queue, rules = model.queue, self._settings.classes[request.priority]
        own_s = float("inf") if request.deadline is None else request.deadline - now
        patience_s = min(rules.patience_s(model.slo), own_s)
        guess = first_guess(request, usable)
        wait_s = queue.wait_s(request, now, guess)
        promise = queue.promised(request)
        is_promised = promise is not None and promise.due <= now + _SOON_S
        if is_promised:
            if queue.length(request.priority) >= 2 * rules.max_length:
                return Shed(request, ShedReason.QUEUE_FULL, wait_s)
        else:
            reason = why_not_wait(request, queue, usable, self._settings, wait_s, patience_s)
            if reason is ShedReason.QUEUE_FULL and self._displace(queue, request, now):
                reason = None
            if reason is not None:
                retry_s = retry_after_s(wait_s, queue.clear_s(request.priority, now), patience_s)
                return self._refuse(queue, request, reason, retry_s, now)
        if is_promised or request.fingerprint:
            queue.redeem(request)
        most_kv = max(replica.limits.kv_capacity_tokens for replica in usable)
        queue.push(request, now, now + patience_s, guess, is_promised=is_promised, most_kv=most_kv)
        heapq.heappush(self._deadlines, (now + patience_s, request.id, request.model))
        self._dispatch(model, now)
        if request.id in queue:
            return Queued(request, queue.length(request.priority), wait_s)
        own = next(decision for decision in self._news if decision.request is request)
        self._news.remove(own)
        return own

    def _hold(self, model: _Model, shed: Shed, now: float) -> Decision:
        """Puts a request into the queue of a model without a replica until one is ready, unless it takes too long."""
        queue, request = model.queue, shed.request
        hold_s, eta_s = self._holds.get(request.model), None
        expected = self._expected.get(request.model)
        if expected is not None and now <= expected.until and not self.has_active(request.model, now):
            if expected.refusal:
                return Shed(request, ShedReason.NOT_LOADED, NOT_LOADED_RETRY_S, expected.refusal)
            eta_s = expected.eta_s(now, now)
            hold_s = expected.hold_s or hold_s
            if hold_s is not None and request.deadline is not None:
                hold_s = request.deadline - now
            if eta_s is not None:
                shed = replace(shed, retry_after_s=max(MIN_RETRY_S, eta_s), is_expected=True)
        elif hold_s is not None and request.deadline is not None:
            hold_s = min(hold_s, request.deadline - now)
        is_full = queue.length(request.priority) >= self._settings.classes[request.priority].max_length
        if hold_s is None or is_full or (eta_s is not None and eta_s > hold_s):
            return shed
        model.shares.seen(request, now)
        queue.push(request, now, now + hold_s, expected_cost(request), is_promised=False, most_kv=request.kv_tokens)
        heapq.heappush(self._deadlines, (now + hold_s, request.id, request.model))
        return Queued(request, queue.length(request.priority), hold_s if eta_s is None else eta_s, is_held=True)

    def _refuse(self, queue: ModelQueue, request: EdgeRequest, reason: ShedReason, retry_s: float, now: float) -> Shed:
        """Refuses, with a place kept for when it is to come back; one that is too early is told the same time again."""
        kept = queue.promised(request) if request.fingerprint else None
        if kept is not None and kept.due > now:
            return Shed(request, reason, kept.due - now)
        queue.promise(request, now + retry_s)
        return Shed(request, reason, retry_s)

    def _displace(self, queue: ModelQueue, newcomer: EdgeRequest, now: float) -> bool:
        victim = queue.victim(newcomer)
        if victim is None:
            return False
        self._give_up(queue, victim.request.id, ShedReason.DISPLACED, now)
        return True

    def _give_up(self, queue: ModelQueue, request_id: str, reason: ShedReason, now: float, detail: str = "") -> None:
        """Refuse one that waits, if it still does."""
        item = queue.remove(request_id)
        if item is not None:
            eta_s = self.eta_s(item.request.model, now) if reason is ShedReason.NO_REPLICA else None
            retry_s = max(MIN_RETRY_S, queue.clear_s(item.request.priority, now) / 2 if eta_s is None else eta_s)
            if reason is ShedReason.NOT_LOADED:
                retry_s = NOT_LOADED_RETRY_S
            refused = self._refuse(queue, item.request, reason, retry_s, now)
            self._news.append(replace(refused, detail=detail, is_expected=eta_s is not None))

    def _add_source(self, request: EdgeRequest, choice: Choice, now: float) -> None:
        """Completes the choice of a replica with a KV transfer: one without room for the request may still hold its
        prompt, or compute it."""
        self.router.add_source(request, choice, self._loads.of_model(request.model), now, self.slo(request.model))

    def _send(self, entry: Entry, choice: Choice, now: float) -> None:
        """Counts a request at the replica that answers it, and its prompt at the one that computes it."""
        self._loads.change(entry.replica_id, now, 1, entry.sent_tokens, entry.request.kv_tokens)
        if (source := choice.source) is not None and source.prefills:
            entry.source_id, entry.source_tokens = source.replica.id, source.computed_tokens
            self._loads.change(entry.source_id, now, 1, entry.source_tokens, entry.request.prompt_tokens)
        self.router.routed(entry.request, choice, now)

    def _leave_source(self, entry: Entry, now: float) -> None:
        """The prompt that another replica computes is ready, or nobody waits for it any more."""
        counted = _prefill_counted(entry, entry.source_tokens, self._loads.base(entry.source_id))
        self._loads.change(entry.source_id, now, -1, -counted, -entry.request.prompt_tokens)
        entry.source_id, entry.source_tokens = "", 0

    def _leave_replica(self, entry: Entry, now: float, used: Used | None) -> None:
        """Takes off what the replica need no longer do. If a snapshot counted the request, that is what it counted."""
        if entry.source_id:
            self._leave_source(entry, now)
        replica, kv = self._loads.base(entry.replica_id), entry.request.kv_tokens
        if replica is None:
            return
        if replica.taken_at >= entry.sent_at:
            growth = int(replica.mean_output_tokens / 2)
            known = used.prompt_tokens + used.output_tokens if used is not None else entry.sent_tokens
            kv = min(kv, known + growth)
        self._loads.change(entry.replica_id, now, -1, -_prefill_counted(entry, entry.sent_tokens, replica), -kv)


def _prefill_tokens(choice: Choice, known_tokens: int, prompt_tokens: int) -> int:
    """Tokens that are left to prefill for the replica that answers, of so many."""
    if (source := choice.source) is None:
        return known_tokens - choice.saved_tokens
    has_all = source.reason is SourceReason.MOVED
    return source.rest_tokens if has_all else source.rest_tokens + known_tokens - prompt_tokens


def _prefill_counted(entry: Entry, sent_tokens: int, replica: ReplicaSnapshot | None) -> int:
    """Returns how much of its prompt is in what we believe a replica has to prefill: all that it was sent, or what was
    left of it, by the replica's speed, when the last snapshot was taken."""
    if replica is None or entry.started_at is not None:
        return 0
    age_s = replica.taken_at - entry.sent_at
    return max(0, sent_tokens - int(replica.prefill_tokens_per_s * age_s)) if age_s > 0 else sent_tokens
