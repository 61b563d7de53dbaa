"""One request's trace as it is taken down: where it was sent, when, and why there. `tracing` makes spans of it."""

from __future__ import annotations

from typing import NamedTuple

from penstock.observe.spans import Root, Roots
from penstock.router.router import Choice


class Visit:
    """At a replica. Times are the gateway's."""

    __slots__ = ("has_failed", "left_at", "outcome", "replica", "sent_at", "span_id")

    def __init__(self, replica: str, span_id: str, sent_at: float) -> None:
        self.replica = replica
        self.span_id = span_id
        self.sent_at = sent_at
        self.left_at: float | None = None
        self.has_failed = False
        self.outcome = ""  # of a prefill for another replica


class StepVisit(NamedTuple):
    """An attempt at a step of a pipeline."""

    name: str
    kind: str  # model, python, branch …
    span_id: str
    parent_id: str  # of the step that it is inside of; empty: the pipeline's
    began: float
    ended: float
    outcome: str  # ok, failed, timeout, cancelled
    reason: str = ""
    model: str = ""
    number: int = 1  # of the attempt
    is_fallback: bool = False
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0
    request_id: str = ""  # of the request that a model step made


class Trace:
    __slots__ = ("_roots", "began", "picks", "prefills", "root", "visits")

    def __init__(self, roots: Roots, root: Root, now: float) -> None:
        self._roots = roots
        self.root = root
        self.began = now
        self.picks: list[tuple[float, Choice]] = []
        self.visits: list[Visit] = []
        self.prefills: list[Visit] = []  # at servers that compute its prompt for another

    @property
    def trace_id(self) -> str:
        return self.root.trace_id

    def new_span_id(self) -> str:
        """For a span that others are to hang below."""
        return self._roots.span_id()

    def chose(self, choice: Choice, now: float) -> None:
        self.picks.append((now, choice))

    def sent(self, replica: str, now: float) -> bytes:
        """The headers that the replica is to be sent."""
        span_id = self._roots.span_id()
        self.visits.append(Visit(replica, span_id, now))
        return self.root.child(span_id).headers()

    def sent_to_prefill(self, replica: str, now: float) -> tuple[bytes, Visit | None]:
        """The same of a server that computes the prompt for another; its visit is ended by the caller."""
        visit = Visit(replica, self._roots.span_id(), now)
        self.prefills.append(visit)
        return self.root.child(visit.span_id).headers(), visit

    def left(self, now: float, *, has_failed: bool) -> None:
        if self.visits:
            visit = self.visits[-1]
            visit.left_at, visit.has_failed = now, has_failed


class PassedOn:
    """A client's context, of a gateway that has no spans of its own."""

    __slots__ = ("_headers", "trace_id")

    def __init__(self, trace_id: str, headers: bytes) -> None:
        self.trace_id = trace_id
        self._headers = headers

    def chose(self, choice: Choice, now: float) -> None:
        pass

    def sent(self, replica: str, now: float) -> bytes:
        return self._headers

    def sent_to_prefill(self, replica: str, now: float) -> tuple[bytes, Visit | None]:
        return self._headers, None

    def left(self, now: float, *, has_failed: bool) -> None:
        pass
