from __future__ import annotations

from typing import Any

import pytest

from penstock.gateway.records.decisions import Decided, Ended
from penstock.replay.replay import Replay
from penstock.router.strategies import RoutingSettings, StrategyName, Weights
from tests.replay.past import Past, ended, replica, request, traffic

CHAIN = tuple(range(100, 104))  # a prompt of four blocks
PROMPT = 1100


def against(strategy: StrategyName, *entries: Decided | Ended, **options: Any) -> Replay:
    return Replay({"other": RoutingSettings(strategy)}, **options).read(entries)


@pytest.mark.parametrize("carries", [False, True])
@pytest.mark.parametrize(
    "strategy", ["kv_aware", "token_aware", "least_connections", "power_of_two", "weighted", "round_robin"]
)
def test_the_same_policy_would_have_done_the_same(strategy: StrategyName, carries: bool) -> None:
    replay = Replay({"same": RoutingSettings(strategy)}, carries=carries).read(traffic(strategy))
    (same,) = replay.others.values()
    assert replay.num_free > 50
    assert same.num_same == replay.num_free
    assert same.requests == replay.recorded.requests
    assert same.reused_tokens == replay.recorded.reused_tokens
    assert list(same.times.queue_s) == pytest.approx(list(replay.recorded.times.queue_s), abs=1e-3)
    assert not same.changes


def test_other_weights_are_another_policy() -> None:
    many, none = (RoutingSettings(weights=Weights(prefix=prefix)) for prefix in (4.0, 0.0))
    replay = Replay({"many": many, "none": none}).read(traffic("kv_aware", 300))
    assert replay.others["many"].reused_tokens >= replay.recorded.reused_tokens > replay.others["none"].reused_tokens
    assert replay.others["none"].num_same < replay.num_free


def three_alike(past: Past) -> list[Decided]:
    """The same prompt three times, a minute apart, to two idle replicas: the first one's place is everybody's."""
    found = []
    for number in range(3):
        past.router.index.reset("a", CHAIN if number else ())
        past.router.index.reset("b", ())
        wanted = request(f"q{number}", PROMPT, CHAIN)
        found.append(past.choose(wanted, [replica("a"), replica("b")], 1000.0 + 60 * number))
    return found


def test_alone_a_choice_finds_the_prefixes_that_were_there() -> None:
    choices = three_alike(Past())
    assert [choice.picked for choice in choices] == ["a", "a", "a"]
    replay = against("round_robin", *choices)
    assert replay.recorded.reused_tokens == 2 * 1024
    assert replay.others["other"].requests == {"a": 2, "b": 1}
    assert replay.others["other"].reused_tokens == 1024  # the third, at a


def test_carried_along_it_finds_those_that_would_have_been_there() -> None:
    choices = three_alike(Past())
    again = Past()
    for name in "ab":
        again.router.index.reset(name, CHAIN if name == "a" else ())
    fourth = again.choose(request("q3", PROMPT, CHAIN), [replica("a"), replica("b")], 1240.0)
    replay = against("round_robin", *choices, fourth, carries=True)
    assert replay.others["other"].requests == {"a": 2, "b": 2}
    assert replay.others["other"].reused_tokens == 2 * 1024  # a has it from the first, b from the second


def test_what_was_there_before_the_log_is_there_for_every_policy() -> None:
    past = Past()
    past.router.index.reset("a", CHAIN)
    choices = [past.choose(request(f"q{n}", PROMPT, CHAIN), [replica("a"), replica("b")], 1000.0 + n) for n in range(3)]
    replay = against("round_robin", *choices, carries=True)
    assert replay.others["other"].requests == {"a": 2, "b": 1}
    assert replay.others["other"].reused_tokens == 2 * 1024


def test_carried_along_a_request_weighs_where_it_would_have_gone() -> None:
    """The first went to a in one log, though an equal draw would have had it at b: there it weighs from then on."""
    past = Past("round_robin")
    idle = [replica("a"), replica("b")]
    first = past.choose(request("q0", 600, random01=0.9), idle, 1000.0)  # equal, so by the draw: b
    busy = [replica(one.id, num_waiting=1, queued_tokens=600) if one.id == first.picked else one for one in idle]
    second = past.choose(request("q1", 600, random01=0.1), busy, 1000.1)
    third = past.choose(
        request("q2", 600, random01=0.1), [replica(n, num_waiting=1, queued_tokens=600) for n in "ab"], 1000.2
    )
    assert (first.picked, second.picked) == ("b", "a")

    def loads(replay: Replay) -> dict[str, int]:
        (open_,) = (found for found in replay._open.values() if found.decided.id == "q2")
        return {one.id: one.sequences for one in open_.others[0].shown.replicas}

    elsewhere = Decided(**{name: getattr(first, name) for name in first.__struct_fields__} | {"picked": "a"})
    assert loads(against("least_connections", first, second, third, carries=True)) == {"a": 1, "b": 1}
    moved = against("least_connections", elsewhere, second, third, carries=True)
    assert moved.others["other"].requests["b"] >= 1
    assert loads(moved)["b"] == 2
    assert loads(against("least_connections", elsewhere, second, third)) == {"a": 1, "b": 1}
    gone = against("least_connections", elsewhere, second, ended(elsewhere), third, carries=True)
    assert loads(gone) == {"a": 1, "b": 1}


def test_of_a_request_that_was_sent_on_no_time_is_judged() -> None:
    past = Past("round_robin")
    first, again = (past.choose(request("q"), [replica("a"), replica("b")], 1000.0 + n) for n in range(2))
    other = past.choose(request("p"), [replica("a"), replica("b")], 1003.0)
    replay = against("round_robin", first, again, ended(again), other, ended(other), ended(other))
    assert (replay.num_requests, replay.num_choices, len(replay.measured)) == (2, 3, 1)


def test_a_session_stays_together_though_the_log_does_not_name_it() -> None:
    past, idle = Past(), [replica(name) for name in "abcd"]
    choices = [
        past.choose(request(f"q{n}", session=f"user {n % 5}", random01=n / 40), idle, 1000.0 + n) for n in range(40)
    ]
    replay = against("session", *choices)
    homes: dict[float | None, set[str]] = {}
    for found in replay._open.values():
        homes.setdefault(found.decided.session, set()).add(found.others[0].replica.id)
    assert [len(where) for where in homes.values()] == [1] * 5
    assert not any("user" in str(choice) for choice in choices)


def test_one_model_can_be_looked_at_alone() -> None:
    entries = list(traffic("kv_aware", 10))
    assert Replay({}, model="m").read(entries).num_choices == 10
    assert Replay({}, model="n").read(entries).num_choices == 0


def test_the_largest_changes_are_kept() -> None:
    replay = Replay({"other": RoutingSettings("round_robin")}, num_changes=3).read(traffic("kv_aware", 200))
    kept = [change.gain_s for _, _, change in replay.others["other"].changes]
    whole = Replay({"other": RoutingSettings("round_robin")}, num_changes=500).read(traffic("kv_aware", 200))
    every = sorted((abs(change.gain_s) for _, _, change in whole.others["other"].changes), reverse=True)
    assert sorted(map(abs, kept), reverse=True) == every[:3]
