"""A replica's spans of a request: made at its end from times that are taken anyway, in the exporter's thread.

gateway's or client's span
└ chat small                        the replica, from arrival to end
  ├ tokenize · KV pull · engine queue · prefill · first token     the parts of the time to the first token
  └ decode
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from penstock.core.ranks import RankFigures
from penstock.observe.backlog import Backlog
from penstock.observe.otlp.names import PROVIDER
from penstock.observe.registry import Counter
from penstock.observe.spans import Attributes, Kind, Root, Roots, Span, Value
from penstock.server.recorder import Finished

_TEXTS = ("embeddings", "rerank", "score", "classify")
_OPERATIONS = {"chat": "chat", "completions": "text_completion", "messages": "chat"} | dict.fromkeys(
    _TEXTS, "embeddings"
)  # by route
_PATHS = {name: f"/v1/{name}" for name in ("completions", "messages", *_TEXTS)} | {"chat": "/v1/chat/completions"}
NO_RANKS: Attributes = {}
_NAMES = {"pull": "KV pull", "queue": "engine queue", "first_token": "first token"}


class Traced(NamedTuple):
    """A request that is over and is kept."""

    end_ns: int
    finished: Finished
    root: Root
    ranks: Attributes = NO_RANKS  # of the model, where there are several


class Traces:
    """A listener of the recorder, in the event loop. `out` is given what is to be exported; `ranks` says how the ranks
    of the model stand: see `rank_attributes`."""

    def __init__(
        self, roots: Roots, out: Backlog[Traced], lost: Counter, ranks: Callable[[], Attributes] = lambda: NO_RANKS
    ) -> None:
        self._ranks = ranks
        self._roots = roots
        self._out = out
        self._lost = lost

    def ended(self, finished: Finished) -> None:
        self._lost.value = self._out.num_lost
        if finished.route not in _OPERATIONS:
            return
        root = self._roots.begin(finished.context)
        if self._roots.sampling.keeps(
            root, has_failed=_has_failed(finished), ttft_s=finished.ttft_s, total_s=finished.total_s
        ):
            self._out.put(Traced(time.time_ns(), finished, root, self._ranks()))


def rank_attributes(layout: str, ranks: Sequence[RankFigures]) -> Attributes:
    """Attributes of how the model is spread, and of each rank's recent steps, in their order; none: there is one rank.
    A figure that one of them lacks is left out."""
    if not layout:
        return NO_RANKS
    found: dict[str, Value] = {"penstock.parallelism": layout}
    figures: dict[str, list[float | None]] = {
        "penstock.rank.memory_bytes": [float(one.memory_bytes) for one in ranks],
        "penstock.rank.mbu": [one.mbu for one in ranks],
        "penstock.rank.communication": [one.communication for one in ranks],
    }
    for name, values in figures.items():
        known = [value for value in values if value is not None]
        if known and len(known) == len(values):
            found[name] = known
    if "penstock.rank.communication" in found:
        found["penstock.rank.communication_method"] = "estimated" if ranks[0].is_estimated else "measured"
    return found


# -- in the exporter's thread


def spans(traced: Traced, span_id: Callable[[], str]) -> Iterator[Span]:
    end_ns, finished, root, ranks = traced
    began_ns = end_ns - _ns(finished.total_s)
    operation = _OPERATIONS[finished.route]
    yield Span(
        f"{operation} {finished.model}",
        Kind.SERVER,
        root.trace_id,
        root.span_id,
        root.parent_id,
        began_ns,
        end_ns,
        {**_of_request(finished, operation), **ranks},
        finished.outcome if _has_failed(finished) else "",
        root.state,
        root.is_sampled,
        root.link,
    )
    parts = dict(finished.parts)
    if finished.ttft_s is not None:
        parts["decode"] = finished.decode_s
    at_ns = began_ns
    for name, seconds in parts.items():
        next_ns = min(end_ns, at_ns + _ns(seconds))
        yield Span(
            _NAMES.get(name, name),
            Kind.INTERNAL,
            root.trace_id,
            span_id(),
            root.span_id,
            at_ns,
            next_ns,
            _of_part(name, finished),
            state=root.state,
            is_sampled=root.is_sampled,
        )
        at_ns = next_ns


def _of_request(finished: Finished, operation: str) -> dict[str, Value]:
    found: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": finished.model,
        "http.request.method": "POST",
        "url.path": _PATHS[finished.route],
        "http.response.status_code": finished.status,
        "penstock.request.id": finished.id,
        "penstock.outcome": finished.outcome,
        "gen_ai.usage.input_tokens": finished.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": finished.cached_tokens,
        "gen_ai.usage.output_tokens": finished.output_tokens,
        "penstock.device_s": finished.cost.device_s,
    }
    if finished.ttft_s is not None:
        found["penstock.ttft_s"] = finished.ttft_s
    if _has_failed(finished):
        found["error.type"] = finished.outcome
    return found


def _of_part(name: str, finished: Finished) -> dict[str, Value]:
    match name:
        case "prefill":
            return {"penstock.tokens": finished.prompt_tokens - finished.cached_tokens}
        case "pull" if finished.engine is not None:
            pulled: dict[str, Value] = {
                "penstock.tokens": finished.engine.pulled_tokens,
                "penstock.outcome": "ok" if finished.engine.is_pull_whole else "incomplete",
            }
            if finished.kv_source is not None:
                pulled["penstock.kv.source"] = finished.kv_source.address
                pulled["penstock.kv.prefills"] = finished.kv_source.prefills
            return pulled
        case "decode":
            return {"penstock.tokens": finished.output_tokens}
        case _:
            return {}


def _has_failed(finished: Finished) -> bool:
    """Whether a request has failed: a client that leaves has not, and neither has one that is refused."""
    return finished.status >= 500 and finished.outcome not in ("cancelled", "request_aborted")


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
