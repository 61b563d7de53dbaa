"""The JSON form of what the page shows. Docs: docs/console.md. No part of a prompt, an answer or a key is in it."""

from __future__ import annotations

from msgspec import Struct

from penstock.api import server_timing
from penstock.api.replica_report import TensorNews
from penstock.console.pipelines import StepCountRow
from penstock.core.ranks import RankFigures
from penstock.gateway.records.facts import RequestFacts
from penstock.router.request import EdgeRequest
from penstock.router.router import Choice

_MAX_CANDIDATES = 12  # of a decision; of more, the best


class ReplicaRow(Struct, frozen=True):
    id: str
    name: str
    model: str
    kind: str  # penstock, or another server's
    state: str  # ready, degraded, draining, out; or what its engine says: starting, parked, restarting, failed, stopped
    breaker: str = "closed"
    share: float = 1.0  # below one while it starts slowly
    running: int = 0
    waiting: int = 0
    in_flight: int = 0  # requests of this gateway
    max_sequences: int | None = None
    kv_used: int = 0  # tokens
    kv_capacity: int | None = None
    tokens_per_s: float | None = None  # made now; None: it does not say
    hit_rate: float | None = None  # cached share of prompt tokens, by the usage of requests since this process began
    step_s: float | None = None
    heard_s_ago: float | None = None
    restarts: int = 0
    version: str = ""  # of its software
    source: str = ""  # that names it: file, store, dns; empty: it is the server itself
    is_draining: bool = False  # an operator said so
    role: str = "both"  # prefill: it computes prompts for others; decode: it answers
    parallelism: str = ""  # of several ranks, in short: TP2 PP2; empty: there is one, or it does not say
    ranks: tuple[RankFigures, ...] = ()  # of its model, as they last said
    tensors: tuple[TensorNews, ...] = ()  # versions of models that take tensors, each with its batcher


class QueueRow(Struct, frozen=True):
    model: str
    waiting: dict[str, int]  # by class
    limits: dict[str, int]  # by class, the most that may wait


class TenantRow(Struct, frozen=True):
    id: str
    name: str = ""
    priority: str = ""
    is_active: bool = True
    requests: int = 0  # since this process began
    refused: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    device_s: float = 0.0  # that replicas measured
    cost: float = 0.0
    today_tokens: int = 0  # of all gateways
    today_cost: float = 0.0
    month_tokens: int = 0
    month_cost: float = 0.0
    month_device_s: float = 0.0
    budget: dict[str, float] = {}  # what bounds it: tokens_per_day, money_per_month …


class ModelRow(Struct, frozen=True):
    """A route: what a client can ask for."""

    name: str
    aliases: tuple[str, ...] = ()
    pools: tuple[str, ...] = ()
    has_price: bool = False
    ttft_s: float | None = None  # the targets, where this process knows them
    tpot_s: float | None = None


class State(Struct, frozen=True):
    models: list[ModelRow]
    replicas: list[ReplicaRow]
    queues: list[QueueRow]
    tenants: list[TenantRow]
    steps: list[StepCountRow] = []  # of pipelines


class RequestRow(Struct, frozen=True):
    id: str
    at_s: float  # when it ended
    surface: str
    ending: str
    reason: str
    tenant: str
    model: str
    replica: str
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_s: float | None
    ttft_s: float | None
    total_s: float | None
    num_tries: int
    rule: str
    cost: float | None  # None: nobody has set a price
    parts: dict[str, float]  # seconds at the replica, in their order, up to the first token
    device_s: float | None = None  # None: its replica does not measure it
    num_steps: int = 0  # of a pipeline
    step_of: str = ""  # the request of a pipeline that it is a step of


class Candidate(Struct, frozen=True):
    replica: str
    total: float
    scores: list[float]  # in the order of the decision's scorers
    matched_tokens: int | None  # of the prompt, that the router expects in its cache; None: it made no estimate
    host_tokens: int  # of those, in its host memory only
    running: int
    queued_tokens: int


class DecisionRow(Struct, frozen=True):
    id: str  # of the request
    at_s: float
    model: str
    tenant: str
    prompt_tokens: int
    strategy: str
    picked: str
    matched_tokens: int | None  # of the prompt, that the router expected in the picked one's cache
    host_tokens: int  # of those, in its host memory only
    block_tokens: int  # the router counts in blocks of so many tokens
    is_approximate: bool
    scorers: list[str]
    candidates: list[Candidate]  # the best first
    num_candidates: int
    dropped: dict[str, str]  # replicas that could not be picked, and why
    source: str = ""  # the replica that KV blocks of the prompt are pulled from
    why: str = ""  # prefill, prefix or moved; or why there is no source; empty: none is possible
    pulled_tokens: int = 0
    gain_s: float | None = None  # that the source was expected to save


def request_row(at_s: float, facts: RequestFacts, replica: str) -> RequestRow:
    return RequestRow(
        facts.id,
        at_s,
        facts.surface,
        facts.ending.value,
        facts.reason,
        facts.tenant,
        facts.model,
        replica,
        facts.input_tokens,
        facts.cached_tokens,
        facts.output_tokens,
        _rounded(facts.queue_s),
        _rounded(facts.ttft_s),
        _rounded(facts.total_s),
        facts.num_tries,
        facts.rule,
        facts.cost,
        server_timing.decode(facts.parts),
        facts.device_s,
        len(facts.steps),
        facts.step_of,
    )


def decision_row(at_s: float, request: EdgeRequest, choice: Choice, names: dict[str, str]) -> DecisionRow:
    """`names`: what replicas are called, by id."""
    totals, candidates = choice.totals, choice.candidates
    order = sorted(range(len(totals)), key=lambda i: (candidates[i] is not choice.replica, -totals[i]))
    shown = [
        Candidate(
            names.get(candidates[i].id, candidates[i].id),
            round(totals[i], 4),
            [round(scores[i], 4) for scores in choice.scores.values()],
            request.tokens_of(choice.matched.get(candidates[i].id, 0)) if request.hashes else None,
            choice.on_host.get(candidates[i].id, 0) * request.block_tokens,
            candidates[i].load.num_running,
            candidates[i].prefill_queued,
        )
        for i in order[:_MAX_CANDIDATES]
    ]
    return DecisionRow(
        request.id,
        at_s,
        request.model,
        request.tenant,
        request.prompt_tokens,
        choice.strategy,
        names.get(choice.replica.id, choice.replica.id) if choice.replica is not None else "",
        choice.matched_tokens if request.hashes else None,
        choice.host_tokens,
        request.block_tokens,
        choice.is_approximate,
        list(choice.scores),
        shown,
        len(totals),
        {names.get(id_, id_): reason for id_, reason in choice.dropped.items()},
        names.get(choice.source.replica.id, choice.source.replica.id) if choice.source is not None else "",
        choice.source.reason.value if choice.source is not None else choice.alone or "",
        choice.source.pulled_tokens if choice.source is not None else 0,
        _rounded(choice.source.gain_s) if choice.source is not None else None,
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
