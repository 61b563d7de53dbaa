"""When and where things happened to one request: taken down as it goes, told at its end."""

from __future__ import annotations

import msgspec

from penstock.gateway.proxy.routed_request import RoutedRequest
from penstock.gateway.records.facts import Ending, RequestFacts
from penstock.gateway.records.token_usage import TokenUsage
from penstock.gateway.records.trace import PassedOn, Trace, Visit


class RequestTimeline(msgspec.Struct, eq=False):
    _began: float
    trace: Trace | PassedOn | None = None
    _sent_at: float | None = None  # to its first replica
    _sent_to: str = ""  # the last one
    _num_sent: int = 0
    _first_at: float | None = None  # an answer began
    _fingerprint: str = ""
    _parts: bytes = b""  # of the time until then, as its replica said

    def sent(self, replica_id: str, now: float) -> bytes:
        """The headers that tell the replica which trace this is part of."""
        if self._sent_at is None:
            self._sent_at = now
        self._sent_to = replica_id
        self._num_sent += 1
        return self.trace.sent(replica_id, now) if self.trace is not None else b""

    def sent_to_prefill(self, replica_id: str, now: float) -> tuple[bytes, Visit | None]:
        """The same for a server that computes the prompt for another; None: there are no spans."""
        return self.trace.sent_to_prefill(replica_id, now) if self.trace is not None else (b"", None)

    def answered(self, now: float, parts: bytes) -> None:
        if self._first_at is None:
            self._first_at, self._parts = now, parts

    def quarantined(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint

    def starts_over(self) -> None:
        """Forgets the answer so far, which the client did not see."""
        self._first_at = None

    def facts(
        self,
        routed: RoutedRequest,
        model: str,
        usage: TokenUsage | None,
        ending: Ending,
        reason: str,
        now: float,
        cost: float | None = None,
        version: str = "",
    ) -> RequestFacts:
        began, sent_at, first_at = self._began, self._sent_at, self._first_at
        work = usage.work if usage is not None else None
        return RequestFacts(
            routed.id,
            routed.surface.name,
            ending,
            reason,
            routed.caller.tenant.id,
            routed.caller.key_id,
            model,
            self._sent_to,
            usage.input_tokens if usage is not None else 0,
            usage.cached_tokens if usage is not None else 0,
            usage.output_tokens if usage is not None else 0,
            sent_at - began if sent_at is not None else None,
            first_at - began if first_at is not None and routed.view.stream else None,
            now - began,
            self._num_sent,
            "" if routed.ruling is None else str(routed.ruling),
            self._parts,
            routed.asked_for,
            cost,
            self.trace,
            work.device_s if work is not None else None,
            work.kv_block_s if work is not None else None,
            self._fingerprint,
            routed.is_batch,
            routed.caller.step_of,
            version=version,
        )
