"""`penstock fleet status`, `explain` and `cost`, of a store that a controller has written to."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.fleet.policy.decision import Action, ActionKind, Decision
from penstock.tenancy import fleet as rows
from penstock.tenancy.fleet import FleetReplica, FleetSample, PoolStatus
from penstock.tenancy.store import open_store

NOW = time.time()


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'fleet.db'}"
    with open_store(url) as store:
        lease = store.fleet.take_lease("f", "a", None)
        assert lease is not None
        with store.fleet.fenced("f", lease) as execute:
            status = PoolStatus(
                "p", NOW - 120, wanted=2, min=1, max=4, states={"active": 2}, start_failures=2, failure="no disk"
            )
            rows.write_pool(execute, status)
            rows.write_replica(execute, FleetReplica("p-1", "p", "active", NOW - 5, zone="a", price_per_hour=2.0))
            for ago, wanted, reason in ((600.0, 1, "a first one"), (300.0, 2, "a surge"), (60.0, 1, "it is over")):
                actions = (Action(ActionKind.START, "wanted"),) if wanted == 2 else ()
                decision = Decision("p", NOW - ago, wanted, actions=actions, reason=reason, numbers={"rate": ago})
                rows.write_decision(execute, decision.at, "p", decision)
                rows.write_sample(execute, FleetSample(NOW - ago, "p", cost=0.25, costs={"active": 0.25}, tokens=100))
    return url


def ago(seconds: float) -> str:
    return datetime.fromtimestamp(NOW - seconds, UTC).isoformat()


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    main(["fleet", *words])
    return capsys.readouterr().out


def test_status_tells_of_a_controller_that_is_gone_and_of_starts_that_fail(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, "status", "--store", url)
    assert "1..4" in text
    assert "p-1" in text
    assert "no controller has looked at it for" in text
    assert "the last 2 starts failed: no disk" in text


def test_explain_says_the_last_decisions_with_their_numbers(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "explain", "--store", url, "--last", "2")
    assert "a first one" not in text
    assert text.index("2 replicas active wanted, 1 before") < text.index("why: a surge") < text.index("it is over")
    assert "done: start a new replica: wanted" in text


def test_explain_says_what_held_at_a_time(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "explain", "p", "--at", ago(120), "--store", url)
    assert "why: a surge" in text
    assert "until" in text
    assert "it is over" not in text
    (found,) = json.loads(said(capsys, "explain", "--at", ago(480), "--json", "--store", url))
    assert found["reason"] == "a first one"
    assert said(capsys, "explain", "--at", ago(86400), "--store", url) == "no decision is recorded for that time\n"


def test_cost_is_by_pool_or_by_tenant(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "cost", "--store", url)
    assert text.splitlines()[1].split()[:5] == ["p", "0.7500", "0.7500", "0.0000", "0.0000"]
    text = said(capsys, "cost", "--by", "tenant", "--store", url)
    assert "(nobody used it)" in text
    document = json.loads(said(capsys, "cost", "--json", "--store", url))
    assert document["pools"][0]["cost"] == pytest.approx(0.75)
