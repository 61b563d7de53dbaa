"""What it is worth that a replica holds a prompt in host memory."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given
from msgspec.structs import replace

from penstock.api.replica_report import ReplicaReport
from penstock.core.measurements import EngineLoad, EngineMeasurements, EngineSpeeds
from penstock.core.replica import HOST_SHARE, ReplicaSnapshot
from penstock.health.reports import snapshot_of
from penstock.router.explanation import route_header
from penstock.router.load import saved_tokens
from penstock.router.request import EdgeRequest
from penstock.router.router import Router

CHAIN = tuple(range(100, 104))
REQUEST = EdgeRequest("q", "m", prompt_tokens=1100, max_tokens=10, hashes=CHAIN)
DEVICE, HOST, NOBODY = (ReplicaSnapshot(id=name, models=("m",)) for name in ("device", "host", "nobody"))


def router() -> Router:
    found = Router()
    found.index.reset("device", CHAIN)
    found.index.reset("host", CHAIN[:2])
    found.index.stored_on_host("host", CHAIN[2:])
    found.index.reset("nobody", ())
    return found


def picked(*replicas: ReplicaSnapshot) -> str:
    replica = router().pick(REQUEST, replicas, 0.0).replica
    assert replica is not None
    return replica.id


def test_the_device_comes_before_the_host_and_the_host_before_nobody() -> None:
    assert picked(NOBODY, HOST, DEVICE) == "device"
    assert picked(NOBODY, HOST) == "host"


def test_a_host_that_copies_no_faster_than_it_computes_counts_for_what_is_on_its_device() -> None:
    slow, fast = replace(HOST, host_share=1.0), replace(HOST, host_share=0.0)
    for replica, saved in ((slow, 512), (fast, 1024), (replace(HOST, host_share=0.5), 768)):
        assert router().saved_tokens(REQUEST, [replica, NOBODY], 0.0) == {"host": saved}


def test_a_busy_replica_with_the_prompt_on_its_host_is_passed_over_sooner_than_one_with_it_on_its_device() -> None:
    """Where fetching costs half of computing, half as long a queue is worth it."""
    passed_over = {
        name: next(
            tokens
            for tokens in range(0, 20_000, 50)
            if picked(NOBODY, replace(replica, load=EngineLoad(queued_tokens=tokens), host_share=0.5)) == "nobody"
        )
        for name, replica in (("device", DEVICE), ("host", HOST))
    }
    assert passed_over["host"] < passed_over["device"]


def test_a_choice_says_how_much_of_what_it_found_is_on_the_host() -> None:
    choice = router().pick(REQUEST, [NOBODY, HOST], 0.0)
    assert (choice.matched_tokens, choice.host_tokens) == (1024, 512)
    assert choice.saved_tokens == 1024 - int(HOST_SHARE * 512)
    assert choice.on_host == {"host": 2}
    assert ";matched=1024;on_host=512;" in route_header(choice)
    assert "on_host" not in route_header(router().pick(REQUEST, [NOBODY, DEVICE], 0.0))


@pytest.mark.parametrize(
    ("prefill", "host", "share"),
    [(1000.0, 4000.0, 0.25), (4000.0, 1000.0, 1.0), (None, 4000.0, HOST_SHARE), (1000.0, None, HOST_SHARE)],
)
def test_what_a_host_hit_costs_is_what_the_replica_measured(
    prefill: float | None, host: float | None, share: float
) -> None:
    report = ReplicaReport("b", "m", "ready", measured=EngineMeasurements(speeds=EngineSpeeds(prefill, None, host)))
    assert snapshot_of(report, DEVICE, 0.0).host_share == share


@given(st.integers(1, 4000), st.integers(0, 20), st.integers(0, 20), st.floats(0.0, 1.0))
def test_a_match_never_saves_more_than_it_holds_nor_less_than_nothing(
    prompt: int, blocks: int, on_host: int, share: float
) -> None:
    request = replace(REQUEST, prompt_tokens=prompt)
    replica = replace(HOST, host_share=share)
    saved = saved_tokens(request, replica, blocks, min(on_host, blocks))
    assert 0 <= saved <= request.tokens_of(blocks) < max(prompt, 1)
