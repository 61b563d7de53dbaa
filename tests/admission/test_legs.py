"""Requests whose prompts another replica computes: what both are believed to have to do, and when a token comes."""

import itertools
from typing import Any

import pytest

from penstock.admission.admission import Admission
from penstock.admission.decision import Admit, Queued
from penstock.core.replica import ReplicaSnapshot, ReplicaState
from penstock.router.legs import SourceReason
from penstock.router.request import EdgeRequest
from tests.snapshots import snapshot

ids = itertools.count()
TOKENS = 8192


def replica(name: str, **facts: Any) -> ReplicaSnapshot:
    return snapshot(
        name,
        **{"models": ("m",), "kv_address": f"{name}:7", "kv_layout": "l", "kv_capacity_tokens": 100_000, **facts},
    )


def request() -> EdgeRequest:
    number = next(ids)
    return EdgeRequest(f"q{number}", "m", TOKENS, 100, hashes=tuple(range(number << 8, (number << 8) + TOKENS // 256)))


D = replica("d", role="decode", num_running=16, num_open=16)
P = replica("p", role="prefill")


def admission_of(*replicas: ReplicaSnapshot) -> Admission:
    admission = Admission()
    for one in replicas:
        admission.replica_changed(one)
    return admission


def admitted(admission: Admission, now: float = 0.0) -> Admit:
    decision = admission.submit(request(), now)
    assert isinstance(decision, Admit)
    return decision


def believed(admission: Admission) -> dict[str, tuple[int, int]]:
    return {one.id: (one.sequences, one.prefill_queued) for one in admission.replicas("m")}


def test_a_split_request_counts_at_both_replicas_until_its_first_token() -> None:
    admission = admission_of(D, P)
    decision = admitted(admission)
    source = decision.choice.source
    assert source is not None
    assert (decision.replica_id, source.replica.id, source.reason) == ("d", "p", SourceReason.PREFILL)
    assert decision.predicted_ttft_s == source.ttft_s
    assert believed(admission) == {"d": (17, 1), "p": (1, TOKENS)}
    admission.started(decision.request.id, 5.0)
    assert believed(admission) == {"d": (17, 0), "p": (0, 0)}
    admission.finished(decision.request.id, 9.0)
    assert believed(admission) == {"d": (16, 0), "p": (0, 0)}


def test_a_split_request_that_ends_before_its_first_token_leaves_both() -> None:
    admission = admission_of(D, P)
    decision = admitted(admission)
    admission.finished(decision.request.id, 1.0)
    assert believed(admission) == {"d": (16, 0), "p": (0, 0)}


def test_a_report_of_the_source_counts_a_prompt_once() -> None:
    admission = admission_of(D, P)
    decision = admitted(admission)
    left = TOKENS - 2000
    admission.replica_changed(replica("p", role="prefill", num_running=1, num_open=1, queued_tokens=left, taken_at=1.0))
    assert believed(admission)["p"] == (1, left)
    admission.started(decision.request.id, 1.0)
    assert believed(admission)["p"] == (0, 0)


def test_prompts_go_to_the_prefill_replica_until_its_queue_is_longer_than_what_that_saves() -> None:
    admission = admission_of(D, P)
    reasons = []
    for _ in range(3):
        choice = admitted(admission).choice
        reasons.append(str(choice.source.reason) if choice.source is not None else str(choice.alone))
    assert reasons == ["prefill", "no_gain", "prefill"]  # the second one's prompt is where the third one is answered


def test_who_finds_prompts_enough_in_front_of_it_at_every_replica_waits() -> None:
    busy_too = replica("p", role="prefill", queued_tokens=60_000)
    admission = admission_of(replica("d", role="decode", num_running=16, num_open=16, queued_tokens=20_000), busy_too)
    assert isinstance(admission.submit(request(), 0.0), Queued)
    alone = admission_of(replica("d", role="decode", num_running=16, num_open=16, queued_tokens=20_000))
    assert isinstance(alone.submit(request(), 0.0), Queued)


def test_a_stream_that_a_draining_replica_gave_back_takes_its_kv_along() -> None:
    first, second = replica("a"), replica("b", queued_tokens=1)
    admission = admission_of(first, second)
    decision = admitted(admission)
    assert decision.replica_id == "a"
    admission.started(decision.request.id, 1.0)
    admission.replica_changed(replica("a", state=ReplicaState.DRAINING))
    choice = admission.reroute(
        decision.request.id, 1.0, frozenset({"a"}), TOKENS + 50, is_begun=True, origin=decision.replica_id
    )
    assert choice is not None
    assert choice.replica is not None
    assert choice.source is not None
    assert (choice.replica.id, choice.source.replica.id, choice.source.reason) == ("b", "a", SourceReason.MOVED)
    assert choice.source.pulled_tokens == TOKENS + 49
    assert believed(admission)["b"] == (1, 2)


@pytest.mark.parametrize("facts", [{"state": ReplicaState.OUT}, {"state": ReplicaState.DRAINING, "kv_layout": "x"}])
def test_a_stream_whose_replica_is_lost_or_laid_out_otherwise_is_computed_again(facts: dict[str, Any]) -> None:
    admission = admission_of(replica("a"), replica("b", queued_tokens=1))
    decision = admitted(admission)
    admission.replica_changed(replica("a", **facts))
    choice = admission.reroute(
        decision.request.id, 1.0, frozenset({"a"}), TOKENS + 50, is_begun=True, origin=decision.replica_id
    )
    assert choice is not None
    assert choice.source is None
    assert believed(admission)["b"] == (1, 1 + TOKENS + 50)
