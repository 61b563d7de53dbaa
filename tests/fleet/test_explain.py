"""Decisions in plain words."""

from __future__ import annotations

from penstock.fleet.explain import explain, number_in_words
from penstock.fleet.policy.decision import Action, ActionKind, Decision
from penstock.fleet.policy.observation import CapacityType


def test_decision_says_what_why_from_what_and_until_when() -> None:
    before, after = Decision("p", 0.0, 1), Decision("p", 3600.0, 1)
    start = Action(ActionKind.START, "2 are wanted", zone="b", capacity_type=CapacityType.SPOT)
    numbers = {"rate": 3.2, "max_rate": 1.7, "forecast_p50_66s": 4.0, "some_new_one": 0.5}
    decision = Decision(
        "p",
        60.0,
        2,
        standby=1,
        actions=(start,),
        reason="a surge",
        bound="max",
        warm_bound="spend",
        numbers=numbers,
    )
    head, *lines = explain(decision, before, after)
    assert head.endswith("p: 2 replicas active, 1 standby wanted, 1 before")
    assert lines[:-1] == [
        "    why: a surge",
        "    bound by the pool's `max`; the demand alone asks for another number",
        "    warm replicas: the spend per hour allows no more; as many are planned as above",
        "    seen: 3.2 requests/s, 1.7 requests/s per replica within the SLO, 4 requests/s expected in 66 s, "
        "some new one 0.5",
        "    done: start a new replica in zone b on spot capacity: 2 are wanted",
    ]
    assert lines[-1].endswith(": 1 replica wanted from then on")


def test_shares_are_percentages_and_high_quantiles_are_bounds() -> None:
    assert number_in_words("predicted_kv_usage", 0.375) == "a KV use of 38% predicted"
    assert number_in_words("forecast_p99_120s", 12.5) == "12.5 requests/s at most (p99) in 120 s"
