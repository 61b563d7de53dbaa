"""Records of a gateway's requests for the world: counts for /metrics and a line in the log for each.

It is told facts, once per request, at its end; nothing here is called per chunk, and what can be read when somebody
asks (queues, replicas, open streams) is not counted at all. It decides nothing and knows no socket.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import NamedTuple, Protocol

from penstock.core.errors import BudgetExhausted, PenstockError, RateLimited
from penstock.core.replica import ReplicaState
from penstock.gateway.monitor.state import GatewayState
from penstock.gateway.proxy.routed_request import RoutedRequest
from penstock.gateway.proxy.ruling import RuleTally
from penstock.gateway.records.decision_log import DecisionLog
from penstock.gateway.records.facts import Ending, RequestFacts, ending_of
from penstock.gateway.records.request_log import RequestLog
from penstock.gateway.records.shadow_counts import ShadowTally
from penstock.gateway.records.step_tally import StepTally
from penstock.gateway.records.token_usage import TokenUsage
from penstock.gateway.records.tracing import Traces
from penstock.gateway.records.version_comparison import Comparison
from penstock.health.breaker import BreakerState
from penstock.observe import background
from penstock.observe import gateway_catalog as catalog
from penstock.observe.catalog import Metric
from penstock.observe.redaction import redact
from penstock.observe.registry import Counter, Histogram, Labels, Registry
from penstock.router.request import EdgeRequest
from penstock.router.router import Choice
from penstock.tenancy.replicas import RESTING

log = logging.getLogger(__name__)

_MAX_TENANTS = 200  # with series of their own
_OTHERS = "other"
NO_HEADERS: Mapping[bytes, bytes] = {}
_STATES = (*ReplicaState, *RESTING)
_KINDS = ("input", "cached", "output")  # of tokens


class Listener(Protocol):
    """Listener that is told the same, in the event loop: every request pays for it."""

    def ended(self, facts: RequestFacts) -> None: ...

    def chose(self, request: EdgeRequest, choice: Choice) -> None: ...


class _Used:
    __slots__ = ("cached", "device", "input", "output")

    def __init__(self, device: Counter, input: Counter, cached: Counter, output: Counter) -> None:
        self.device, self.input, self.cached, self.output = device, input, cached, output

    def add(self, facts: RequestFacts) -> None:
        self.input.value += facts.input_tokens
        self.cached.value += facts.cached_tokens
        self.output.value += facts.output_tokens
        self.device.value += facts.device_s or 0.0


class _Model(NamedTuple):
    ttft: Histogram
    total: Histogram
    queue: Histogram
    used: _Used
    kv_blocks: Counter
    cost: Counter


class GatewayRecorder:
    """Belongs to the event loop's thread; only `render` may run in another."""

    def __init__(
        self, log: RequestLog | None = None, decisions: DecisionLog | None = None, traces: Traces | None = None
    ) -> None:
        self._log = log
        self._decisions = decisions
        self.traces = traces or Traces()
        self.usage_lost: Callable[[], Mapping[str, int]] = dict  # by reason, as the ledger counts it
        self.rollout_lost: Callable[[], Mapping[str, int]] = dict  # by kind, as their writer counts it
        self.batch_counts: Callable[[], Mapping[Metric, Mapping[Labels, float]]] = dict  # as their runner counts them
        self.pipeline_counts: Callable[[], Mapping[Metric, Mapping[Labels, float]]] = dict  # likewise
        self.listeners: list[Listener] = []
        self.pipeline_told: Callable[[RequestFacts], object] = lambda facts: None  # who is told of pipelines alone
        self.put_aside: deque[RequestFacts] | None = None  # for whoever reads many at once; None: nobody does
        self._registry = Registry(catalog.GATEWAY_CATALOG)
        self.exports = [self._registry]  # and metrics that are kept elsewhere
        self._ended: dict[tuple[str, str, str, str], Counter] = {}
        self._models: dict[str, _Model] = {}
        self._tenants: dict[str, _Used] = {}
        self._prefillers_answer: set[str] = (
            set()
        )  # models whose replicas with the role prefill answer, for want of others
        self._handover_complaints: dict[str, str] = {}  # by replica
        self._silent: set[tuple[str, str]] = set()  # models and replicas whose answers came without a usage
        self.rules = RuleTally(self._registry)
        self.shadows = ShadowTally(self._registry)
        self.steps = StepTally(self._registry)
        self._version_of: Mapping[str, str] = {}
        self.versions = Comparison()

    def compare(self, versions: Mapping[str, str]) -> None:
        """Keeps what can be told of each minute for these versions of models, by their keys."""
        self._version_of = versions
        self.versions.use(versions)

    # -- facts

    def ended(self, facts: RequestFacts) -> None:
        series = facts.series
        key = (series, facts.surface, facts.ending, facts.reason)
        count = self._ended.get(key)
        if count is None:
            count = self._ended[key] = self._registry.count(catalog.REQUESTS, *map(str, key))
        count.value += 1
        if facts.queue_s is not None:  # it was sent to a replica
            self._measure(facts, series)
        if facts.version:
            self._compare(facts)
        if self._log is not None:
            self._log.append(facts)
        if self._decisions is not None and facts.replica:
            self._decisions.ended(facts)
        if facts.trace is not None:
            self.traces.ended(facts)
        if self.put_aside is not None:
            self.put_aside.append(facts)
        for listener in self.listeners:
            listener.ended(facts)

    def pipeline_ended(self, facts: RequestFacts) -> None:
        """A request for a pipeline, whose model steps were told as requests of their own: here it is counted as one,
        and its steps as such."""
        key = (facts.series, facts.surface, facts.ending, facts.reason)
        self._registry.count(catalog.REQUESTS, *map(str, key)).value += 1
        if not facts.is_batch:
            if facts.ttft_s is not None:
                self._registry.spread(catalog.TTFT, facts.series).observe(facts.ttft_s)
            if facts.ending is Ending.OK and facts.total_s is not None:
                self._registry.spread(catalog.REQUEST_LATENCY, facts.series).observe(facts.total_s)
        self._compare(facts)
        self.steps.ended(facts.model, facts.steps)
        self.pipeline_told(facts)
        if self._log is not None:
            self._log.append(facts)
        if facts.trace is not None:
            self.traces.ended(facts)
        for listener in self.listeners:
            listener.ended(facts)

    def asked(self, routed: RoutedRequest) -> None:
        """Passes on what a client sent, for logs whose operator wants it."""
        if self._log is not None and self._log.wants_prompts:
            self._log.asked(routed.id, routed.caller.tenant.id, routed.body)

    def chose(self, routed: RoutedRequest, request: EdgeRequest, choice: Choice, now: float) -> None:
        """A replica, for a request that is sent there now."""
        if self._decisions is not None:
            version = self._version_of.get(request.version, "")
            self._decisions.decided(
                request, choice, now, route=routed.asked_for, version=version, rule=str(routed.ruling or "")
            )
        self._count_legs(request.model, choice)
        for listener in self.listeners:
            listener.chose(request, choice)

    def _count_legs(self, model: str, choice: Choice) -> None:
        if choice.source is not None:
            self._registry.count(catalog.KV_SOURCES, model, choice.source.reason).value += 1
        elif choice.alone is not None:
            self._registry.count(catalog.KV_ALONE, model, choice.alone).value += 1
        if choice.replica is not None and choice.replica.role == "prefill":
            self._registry.count(catalog.PREFILL_ANSWERS, model).value += 1
            if model not in self._prefillers_answer:
                self._prefillers_answer.add(model)
                log.warning(
                    "no replica of %s can answer but those with the role prefill: they do, until one can", model
                )
        elif model in self._prefillers_answer:
            self._prefillers_answer.discard(model)
            log.warning("a replica of %s with another role than prefill answers again", model)

    def prefilled(self, model: str, replica: str, outcome: str, said: str, seconds: float = 0.0) -> None:
        """A server that is not penstock's was to compute a prompt for another. It is complained of once, for each new
        reason, until it does so again."""
        self._registry.count(catalog.HANDOVERS, model, outcome).value += 1
        if outcome == "handed_over":
            self._registry.spread(catalog.HANDOVER_TIME, model).observe(seconds)
            self._handover_complaints.pop(replica, None)
        elif outcome != "not_shared" and self._handover_complaints.get(replica) != outcome:
            self._handover_complaints[replica] = outcome
            log.warning("%s hands no prompts of %s over: %s: %s", redact(replica), model, outcome, redact(said))

    def shadowed(
        self,
        version: str,
        at_s: float,
        outcome: str,
        usage: TokenUsage | None,
        ttft_s: float | None,
        total_s: float | None,
    ) -> None:
        """A copy ended that nobody waited for."""
        self.shadows.ended(version, outcome, usage, ttft_s, total_s)
        self.versions.copied(version, at_s, outcome, usage, ttft_s, total_s)

    def compared(self, model: str, what: str, outcome: str) -> None:
        """Answers of a model under a rollout were compared or checked, or were not."""
        self._registry.count(catalog.ROLLOUT_COMPARISONS, model, what, outcome).value += 1

    def turned_away(
        self,
        request_id: str,
        surface: str,
        error: PenstockError,
        headers: Mapping[bytes, bytes] = NO_HEADERS,
        tenant: str = "",
        key_id: str = "",
    ) -> None:
        """Before anybody worked for it; `tenant`: empty if nobody knows whose it is."""
        ending, reason = ending_of(error)
        self.refused(error)
        trace = self.traces.begin(headers, 0.0)
        self.ended(RequestFacts(request_id, surface, ending, reason, tenant, key_id, trace=trace))

    def refused(self, error: PenstockError) -> None:
        if isinstance(error, RateLimited | BudgetExhausted):
            self._registry.count(catalog.LIMIT_REFUSALS, error.reason or error.code).value += 1

    def retried(self, model: str) -> None:
        self._registry.count(catalog.RETRIES, model).value += 1

    def was_held(self, model: str, seconds: float) -> None:
        """A request that was sent to a replica had waited for want of one."""
        self._registry.spread(catalog.HOLD_WAIT, model).observe(seconds)

    def carried_on(self, model: str) -> None:
        self._registry.count(catalog.CARRIED_ON, model).value += 1

    def quarantined(self, model: str, tenant: str, fingerprint: str, lost: Iterable[str]) -> None:
        """A request that replicas were lost with is refused from now on."""
        self._registry.count(catalog.QUARANTINED, model).value += 1
        replicas = ", ".join(map(redact, sorted(lost)))
        log.error("%s: request %s of tenant %s is refused: %s lost with it", model, fingerprint, tenant, replicas)

    def fell_back(self, model: str, to: str, reason: str) -> None:
        self._registry.count(catalog.FALLBACKS, model, to, reason).value += 1

    def usage_missing(self, model: str, replica: str) -> None:
        """An answer came without its usage, so what is charged for it is an estimate."""
        count = self._registry.count(catalog.USAGE_MISSING, model)
        count.value += 1
        if (model, replica) not in self._silent:
            self._silent.add((model, replica))
            log.warning(
                "%s does not say what its answers of %s used: tenants are charged by counted events, or for as much as "
                "was reserved (penstock_gateway_usage_missing_total counts such answers)",
                redact(replica),
                model,
            )

    def replica_removed(self, model: str, replica: str) -> None:
        self._silent.discard((model, replica))

    def has_certificate(self, expires_at: float) -> None:
        self._registry.count(catalog.TLS_EXPIRY).value = expires_at

    # -- what can be seen without counting

    def look(self, state: GatewayState) -> None:
        """Takes down how things stand, before `render`."""
        replace, named = self._registry.replace, {(one.model, one.id): one for one in state.replicas}
        of_model = {queue.model: [one for one in state.replicas if one.model == queue.model] for queue in state.queues}
        replace(catalog.REQUESTS_OPEN, {(model,): sum(one.in_flight for one in of_model[model]) for model in of_model})
        replace(catalog.STREAMS_OPEN, {(model,): sum(one.streams for one in of_model[model]) for model in of_model})
        replace(
            catalog.QUEUE_LENGTH, {(q.model, name): count for q in state.queues for name, count in q.waiting.items()}
        )
        replace(catalog.HELD, {(queue.model,): queue.held for queue in state.queues})
        replace(catalog.REPLICA_REQUESTS, {key: one.in_flight for key, one in named.items()})
        replace(catalog.REPLICA_KV_EXACT, {key: int(one.is_kv_exact) for key, one in named.items()})
        replace(
            catalog.REPLICA_STATE,
            {(*key, str(state)): int(state == one.state) for key, one in named.items() for state in _STATES},
        )
        replace(
            catalog.REPLICA_BREAKER,
            {(*key, str(state)): int(state == one.breaker) for key, one in named.items() for state in BreakerState},
        )
        if self._log is not None:
            self._registry.count(catalog.LOG_LINES_LOST).value = self._log.num_lost
        if self._decisions is not None:
            self._registry.count(catalog.DECISIONS_LOST).value = self._decisions.num_lost
        self._registry.count(catalog.TRACES_LOST).value = self.traces.num_lost
        for metric, values in chain(self.batch_counts().items(), self.pipeline_counts().items()):
            replace(metric, values)
        replace(catalog.ROLLOUT_LOST, {(kind,): count for kind, count in self.rollout_lost().items()})
        replace(catalog.USAGE_LOST, {(reason,): count for reason, count in self.usage_lost().items()})
        replace(catalog.BACKGROUND_ERRORS, {(work,): count for work, count in background.errors().items()})
        replace(catalog.BACKGROUND_DEAD, {(work,): 1 for work in background.dead()})

    def render(self) -> bytes:
        return b"".join([registry.exposition() for registry in self.exports])

    # -- inside

    def _compare(self, facts: RequestFacts) -> None:
        if facts.version in self.versions:
            usage = TokenUsage(facts.input_tokens, facts.output_tokens, facts.cached_tokens)
            self.versions.answered(facts.version, time.time(), facts.ending, usage, facts.ttft_s, facts.total_s)

    def _measure(self, facts: RequestFacts, series: str) -> None:
        model = self._models.get(series)
        if model is None:
            model = self._models[series] = self._open(series)
        assert facts.queue_s is not None
        if not facts.is_batch:
            model.queue.observe(facts.queue_s)
            if facts.ttft_s is not None:
                model.ttft.observe(facts.ttft_s)
            if facts.ending is Ending.OK and facts.total_s is not None:
                model.total.observe(facts.total_s)
        if facts.input_tokens or facts.output_tokens:
            model.used.add(facts)
            model.kv_blocks.value += facts.kv_block_s or 0.0
            model.cost.value += facts.cost or 0.0
            tenant = self._tenants.get(facts.tenant)
            if tenant is None:
                tenant = self._tenant(facts.tenant)
            tenant.add(facts)

    def _open(self, model: str) -> _Model:
        spread, count = self._registry.spread, self._registry.count
        return _Model(
            spread(catalog.TTFT, model),
            spread(catalog.REQUEST_LATENCY, model),
            spread(catalog.QUEUE_WAIT, model),
            _Used(count(catalog.DEVICE_SECONDS, model), *(count(catalog.TOKENS, model, kind) for kind in _KINDS)),
            count(catalog.KV_BLOCK_SECONDS, model),
            count(catalog.COST, model),
        )

    def _tenant(self, tenant: str) -> _Used:
        """Counts of a tenant. A series keeps its name: one that moved to the others and back would be no counter."""
        name = tenant if len(self._tenants) < _MAX_TENANTS else _OTHERS
        count = self._registry.count
        tokens = (count(catalog.TENANT_TOKENS, name, kind) for kind in _KINDS)
        found = _Used(count(catalog.TENANT_DEVICE_SECONDS, name), *tokens)
        if name is not _OTHERS:
            self._tenants[tenant] = found
        return found
