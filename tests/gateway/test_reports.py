"""A replica's reports as admission sees them."""

from __future__ import annotations

from penstock.admission.admission import Admission
from penstock.api.replica_report import ReplicaReport
from penstock.core.replica import ReplicaSnapshot
from penstock.gateway.reports import ReportTimes, snapshot_of
from penstock.router.request import EdgeRequest

IDLE = ReplicaReport(
    boot="b",
    model="m",
    state="ready",
    max_num_seqs=8,
    max_open=8,
    kv_capacity_tokens=10_000,
    max_model_len=10_000,
    chunk_tokens=1024,
)


def test_a_report_that_met_a_request_on_the_way_does_not_make_it_forgotten() -> None:
    """It was written before the request came and is heard after it was sent."""
    admission, last, times = Admission(), ReplicaSnapshot(id="a", models=("m",)), ReportTimes()

    def heard(at: float) -> None:
        admission.replica_changed(snapshot_of(IDLE, last, times.taken_at(at)))

    heard(100.0)
    admission.submit(EdgeRequest("q", "m", 5000, 100, ""), 100.02)
    heard(100.03)
    (seen,) = admission.replicas("m")
    assert (seen.sequences, seen.prefill_queued, seen.kv_used_tokens) == (1, 5000, 5100)
    heard(100.04)
    (seen,) = admission.replicas("m")
    assert seen.sequences == 0


def test_a_report_after_a_pause_has_all_but_what_is_quite_new() -> None:
    times = ReportTimes()
    assert times.taken_at(100.0) < 100.0
    assert times.taken_at(101.0) == 101.0 - ReportTimes.IN_FLIGHT_S
