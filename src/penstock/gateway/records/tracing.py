"""One request's trace: taken down as it goes, and made into spans at its end, in the exporter's thread.

client's span
└ chat small                       the gateway, from arrival to end
  ├ admission                      until it is first sent somewhere: the limiter and the queue
  ├ pick                           a moment, with every candidate's scores; again for each replica it is sent to
  ├ POST http://…                  at a server that computes the prompt for another
  └ POST http://…                  at that replica, whose own spans hang below: it is sent this one's id

Instead of picks and replicas a request for a pipeline has its steps, each attempt by itself and inside the step that it
is a part of. Below that of a model step is the span of the request that it made.

client's span
└ chat support
  ├ admission
  ├ step language
  │ └ tensors classifier …         a request as above
  └ step answer

Where nothing is exported, a client's context is passed on to the replica as it came.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit

from penstock.api import server_timing
from penstock.gateway.records.facts import RequestFacts
from penstock.gateway.records.trace import PassedOn, StepVisit, Trace, Visit
from penstock.observe.backlog import Backlog
from penstock.observe.otlp.names import PROVIDER
from penstock.observe.redaction import redact
from penstock.observe.spans import Attributes, Kind, Roots, Span, Value
from penstock.observe.trace_context import PARENT, STATE, parse
from penstock.router.router import Choice

# By surface; all others are chats.
_OPERATIONS = (
    {"completions": "text_completion"}
    | dict.fromkeys(("embeddings", "rerank", "score", "classify"), "embeddings")
    | dict.fromkeys(("tokenize", "detokenize", "chat/completions/render", "messages/count_tokens"), "tokenize")
)
_MAX_CANDIDATES = 16  # of a pick; of more, the best


class Traced(NamedTuple):
    """A request that is over and is kept."""

    end_ns: int
    facts: RequestFacts
    trace: Trace


class Traces:
    """Belongs to the event loop. `out` is given what is to be exported; without it nothing is."""

    def __init__(self, roots: Roots | None = None, out: Backlog[Traced] | None = None) -> None:
        self._roots = roots
        self._out = out

    @property
    def num_lost(self) -> int:
        return self._out.num_lost if self._out is not None else 0

    def begin(self, headers: Mapping[bytes, bytes], now: float, *, is_own: bool = False) -> Trace | PassedOn | None:
        """`is_own`: the headers are this gateway's, of a pipeline's step."""
        if self._roots is not None:
            return Trace(self._roots, self._roots.begin(headers, is_own=is_own), now)
        parent = headers.get(PARENT)
        theirs = parse(parent, headers.get(STATE, b"")) if parent is not None else None
        return PassedOn(theirs.trace_id, theirs.headers()) if theirs is not None else None

    def ended(self, facts: RequestFacts) -> None:
        trace = facts.trace
        if self._roots is None or self._out is None or not isinstance(trace, Trace):
            return
        has_failed = facts.ending == "failed"
        if self._roots.sampling.keeps(trace.root, has_failed=has_failed, ttft_s=facts.ttft_s, total_s=facts.total_s):
            self._out.put(Traced(time.time_ns(), facts, trace))


# -- in the exporter's thread


def spans(traced: Traced, span_id: Callable[[], str]) -> Iterator[Span]:
    end_ns, facts, trace = traced
    began_ns = end_ns - _ns(facts.total_s or 0.0)

    def at(moment: float) -> int:
        return min(end_ns, began_ns + _ns(moment - trace.began))

    root = trace.root
    yield Span(
        f"{_operation(facts)} {facts.model or facts.route}".strip(),
        Kind.SERVER,
        root.trace_id,
        root.span_id,
        root.parent_id,
        began_ns,
        end_ns,
        _of_request(facts),
        error=_error(facts),
        state=root.state,
        is_sampled=root.is_sampled,
        link=root.link,
    )

    def child(
        name: str,
        start: float,
        end: float,
        attributes: Attributes,
        error: str = "",
        id: str = "",
        kind: Kind = Kind.INTERNAL,
        parent_id: str = "",
    ) -> Span:
        return Span(
            name,
            kind,
            root.trace_id,
            id or span_id(),
            parent_id or root.span_id,
            at(start),
            at(end),
            attributes,
            error=error,
            state=root.state,
            is_sampled=root.is_sampled,
        )

    if facts.total_s is not None:
        sent_at = trace.visits[0].sent_at if trace.visits else trace.began + facts.total_s
        sent_at = min((step.began for step in facts.steps), default=sent_at)
        yield child("admission", trace.began, sent_at, {"penstock.tenant": facts.tenant})
    for moment, choice in trace.picks:
        yield child("pick", moment, moment, _of_pick(choice))
    ended_at = trace.began + (facts.total_s or 0.0)
    for step in facts.steps:
        error = (step.reason or step.outcome) if step.outcome in ("failed", "timeout") else ""
        yield child(
            f"step {step.name}",
            step.began,
            step.ended,
            _of_step(step),
            error,
            step.span_id,
            parent_id=step.parent_id,
        )
    for visit in trace.prefills:
        attributes = {"penstock.leg": "prefill", "penstock.outcome": visit.outcome, **_address(visit.replica)}
        error = visit.outcome if visit.has_failed else ""
        left_at = visit.left_at if visit.left_at is not None else ended_at
        yield child(
            f"POST {redact(visit.replica)}", visit.sent_at, left_at, attributes, error, visit.span_id, Kind.CLIENT
        )
    for number, visit in enumerate(trace.visits, 1):
        is_last = number == len(trace.visits)  # after any other it went elsewhere
        attributes = _of_visit(visit, number) | (_parts(facts) if is_last else {})
        error = "the replica failed" if visit.has_failed else "" if is_last else "it was sent elsewhere"
        left_at = visit.left_at if visit.left_at is not None else ended_at
        yield child(
            f"POST {redact(visit.replica)}", visit.sent_at, left_at, attributes, error, visit.span_id, Kind.CLIENT
        )


def _of_request(facts: RequestFacts) -> dict[str, Value]:
    found: dict[str, Value] = {
        "gen_ai.operation.name": _operation(facts),
        "gen_ai.provider.name": PROVIDER,
        "http.request.method": "POST",
        "url.path": f"/v1/{facts.surface}",
        "penstock.request.id": facts.id,
        "penstock.ending": facts.ending.value,
        "penstock.tries": facts.num_tries,
    }
    named: dict[str, Value | None] = {
        "gen_ai.request.model": facts.route or facts.model,
        "gen_ai.response.model": facts.model,
        "penstock.tenant": facts.tenant,
        "penstock.rule": facts.rule,
        "error.type": _error(facts),
        "penstock.reason": facts.reason,
        "penstock.queue_s": facts.queue_s,
        "penstock.ttft_s": facts.ttft_s,
        "penstock.device_s": facts.device_s,
    }
    found |= {key: value for key, value in named.items() if value not in ("", None)}
    if facts.input_tokens or facts.output_tokens:
        found |= {
            "gen_ai.usage.input_tokens": facts.input_tokens,
            "gen_ai.usage.cache_read.input_tokens": facts.cached_tokens,
            "gen_ai.usage.output_tokens": facts.output_tokens,
        }
    if facts.cost is not None:
        found["penstock.cost"] = facts.cost
    return found


def _of_pick(choice: Choice) -> dict[str, Value]:
    order = sorted(
        range(len(choice.totals)), key=lambda i: (choice.candidates[i] is not choice.replica, -choice.totals[i])
    )
    shown = order[:_MAX_CANDIDATES]
    found: dict[str, Value] = {
        "penstock.pick.strategy": choice.strategy,
        "penstock.pick.replica": redact(choice.replica.id) if choice.replica is not None else "",
        "penstock.pick.num_candidates": len(order),
        "penstock.pick.matched_tokens": choice.matched_tokens,
        "penstock.pick.host_tokens": choice.host_tokens,
        "penstock.pick.candidates": [redact(choice.candidates[i].id) for i in shown],
        "penstock.pick.totals": [choice.totals[i] for i in shown],
    }
    found |= {f"penstock.pick.scores.{name}": [scores[i] for i in shown] for name, scores in choice.scores.items()}
    if (source := choice.source) is not None:
        found |= {
            "penstock.pick.source": redact(source.replica.id),
            "penstock.pick.source_reason": source.reason.value,
            "penstock.pick.pulled_tokens": source.pulled_tokens,
            "penstock.pick.source_gain_s": source.gain_s,
        }
    elif choice.alone is not None:
        found["penstock.pick.alone"] = choice.alone.value
    if choice.dropped:
        found["penstock.pick.dropped"] = [f"{redact(id_)}: {reason}" for id_, reason in choice.dropped.items()]
    return found


def _of_step(step: StepVisit) -> dict[str, Value]:
    found: dict[str, Value] = {
        "penstock.step": step.name,
        "penstock.step.kind": step.kind,
        "penstock.step.attempt": step.number,
        "penstock.step.outcome": step.outcome,
    }
    if step.is_fallback:
        found["penstock.step.fallback"] = True
    if step.reason:
        found["penstock.reason"] = step.reason
    if step.model:
        found |= {"gen_ai.request.model": step.model, "penstock.cost": step.cost}
    if step.input_tokens or step.output_tokens:
        found |= {
            "gen_ai.usage.input_tokens": step.input_tokens,
            "gen_ai.usage.output_tokens": step.output_tokens,
        }
    return found


def _of_visit(visit: Visit, number: int) -> dict[str, Value]:
    return {"penstock.try": number, **_address(visit.replica)}


def _parts(facts: RequestFacts) -> dict[str, Value]:
    """Returns what the replica said of itself, should its own spans not be kept."""
    return {f"penstock.replica.{name}_s": seconds for name, seconds in server_timing.decode(facts.parts).items()}


@lru_cache(maxsize=1024)
def _address(replica: str) -> dict[str, Value]:
    parts = urlsplit(replica)
    try:
        port = parts.port
    except ValueError:
        port = None
    found: dict[str, Value] = {"server.address": parts.hostname or redact(replica)}
    return found | ({"server.port": port} if port is not None else {})


def _operation(facts: RequestFacts) -> str:
    return _OPERATIONS.get(facts.surface, "chat")


def _error(facts: RequestFacts) -> str:
    """Returns the error of a server's span: what a client did wrong is none."""
    return (facts.reason or "failed") if facts.ending == "failed" else ""


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
