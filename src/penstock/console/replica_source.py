"""A replica that nobody stands in front of, as the page shows it: one engine with its model, or the versions of models
that take tensors; and no tenants."""

from __future__ import annotations

from collections.abc import Callable

from penstock import __version__
from penstock.api import server_timing
from penstock.api.replica_report import ReplicaReport
from penstock.console.history import Backlog
from penstock.console.reports import CacheHits, Production
from penstock.console.views import ModelRow, QueueRow, ReplicaRow, State
from penstock.core.slo import Slo
from penstock.gateway.records.facts import Ending, RequestFacts
from penstock.server.recorder import Finished

_NAME = "engine"  # what its one replica is called


class ReplicaSource:
    kind = "replica"

    def __init__(self, model: str, slo: Slo, report: Callable[[], ReplicaReport]) -> None:
        self._model = model
        self._slo = slo
        self._report = report
        self._made: Production | None = None
        self._hits = CacheHits()

    def names(self) -> dict[str, str]:
        return {}

    def says_output(self, replica_id: str) -> bool:
        return True

    def ended(self, facts: RequestFacts) -> None:
        self._hits.add(facts)

    def backlogs(self, now_s: float) -> dict[str, Backlog]:
        report = self._report()
        made = 0
        if self._made is None:
            self._made = Production(report, now_s)
        else:
            made = self._made.since_last(report, now_s)
        load, has_limits = report.measured.load, report.measured.limits.kv_capacity_tokens > 0
        kv = report.measured.kv_usage if has_limits else None
        return {self._model: Backlog(load.num_queued, load.num_running, kv, made)}

    def state(self, now_s: float) -> State:
        report = self._report()
        load, limits = report.measured.load, report.measured.limits
        replica = ReplicaRow(
            id=_NAME,
            name=_NAME,
            model=self._model,
            kind="penstock",
            state=report.shown_state,
            running=load.num_running,
            waiting=load.num_queued,
            in_flight=load.num_open,
            kv_used=load.kv_active_tokens,
            max_sequences=limits.max_sequences or None,
            kv_capacity=limits.kv_capacity_tokens or None,
            hit_rate=self._hits.rate,
            tokens_per_s=self._made.rate if self._made is not None else None,
            step_s=report.measured.speeds.decode_step_s,
            restarts=report.restarts,
            version=__version__,
            role=report.role,
            parallelism=report.measured.device.parallelism,
            ranks=report.measured.device.ranks,
            tensors=report.tensors,
        )
        return State(
            self._models(report),
            [replica],
            [QueueRow(self._model, {"engine": load.num_queued}, {"engine": limits.max_open})],
            [],
        )

    def _models(self, report: ReplicaReport) -> list[ModelRow]:
        if report.takes_tensors:
            return [ModelRow(name) for name in dict.fromkeys(one.model for one in report.tensors)]
        return [ModelRow(self._model, (), (self._model,), False, self._slo.ttft_s, self._slo.tpot_s)]


def facts_of(finished: Finished) -> RequestFacts:
    """A request as a gateway would have told it."""
    if finished.outcome == "ok":
        ending, reason = Ending.OK, ""
    elif finished.outcome in ("cancelled", "request_aborted"):
        ending, reason = Ending.CLIENT_GONE, ""
    else:
        ending, reason = Ending.FAILED if finished.status >= 500 else Ending.REFUSED, finished.outcome
    return RequestFacts(
        id=finished.id,
        surface=finished.route,
        ending=ending,
        reason=reason,
        model=finished.model,
        replica=_NAME,
        input_tokens=finished.prompt_tokens,
        cached_tokens=finished.cached_tokens,
        output_tokens=finished.output_tokens,
        queue_s=0.0 if finished.parts else None,
        ttft_s=finished.ttft_s if finished.is_stream else None,
        total_s=finished.total_s,
        num_tries=1,
        parts=server_timing.encode(finished.parts) if finished.parts else b"",
        device_s=finished.cost.device_s,
    )
