from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.core.replica import UNBOUNDED
from penstock.replay.replay import Replay
from penstock.replay.report import Report, report
from penstock.replay.text import lines
from penstock.router.strategies import STRATEGIES, RoutingSettings
from tests.replay.past import Past, ended, replica, request, traffic


def found(*policies: Any, strategy: Any = "kv_aware", count: int = 200, **options: Any) -> Report:
    wanted = {name: RoutingSettings(name) for name in policies}
    return report(Replay(wanted, **options).read(traffic(strategy, count, slower=2.0)))


def text(of: Report) -> str:
    return "\n".join(lines(of))


def test_what_was_recorded_is_estimated_as_it_was_measured() -> None:
    told = found("round_robin")
    assert told.is_fitted
    assert told.estimate.fit is not None
    assert (told.estimate.fit.queue, told.estimate.fit.prefill) == pytest.approx((2.0, 2.0), rel=0.01)
    assert told.estimate.measured is not None
    assert told.recorded.ttft is not None
    assert told.recorded.ttft.mean_s == pytest.approx(told.estimate.measured.mean_s, rel=0.01)
    assert told.recorded.measured_same == told.estimate.measured


def test_a_worse_policy_is_told_by_how_much() -> None:
    told = found("round_robin", "kv_aware")
    same, worse = told.others["kv_aware"], told.others["round_robin"]
    assert (same.agreement, same.more_s, same.more_error_s) == (1.0, 0.0, 0.0)
    assert worse.agreement < 0.8
    assert worse.more_s > worse.more_error_s > 0
    assert worse.reused_tokens < same.reused_tokens
    assert worse.ttft is not None
    assert worse.ttft.mean_s - (told.recorded.ttft.mean_s if told.recorded.ttft else 0) == pytest.approx(worse.more_s)
    assert sum(share.requests for share in worse.shares.values()) == pytest.approx(1.0)
    assert sum(share.computed for share in worse.shares.values()) == pytest.approx(1.0)


def test_a_change_says_why() -> None:
    past = Past()
    past.router.index.reset("a", (1, 2))
    choice = past.choose(request("q", 1000, (1, 2, 3)), [replica("a"), replica("b", queued_tokens=700)], 1000.0)
    turn = Past("round_robin").choose(request("p"), [replica("a")], 999.0)  # so that it is b's
    replay = Replay({"round_robin": RoutingSettings("round_robin")}).read([turn, choice, ended(choice, 0.4)])
    (changed,) = report(replay).others["round_robin"].changed
    assert (changed.recorded, changed.other, changed.measured_s) == ("a", "b", 0.4)
    assert changed.because == "0 instead of 512 of its tokens there, 700 instead of 0 tokens to compute before it"
    assert changed.other_s - changed.recorded_s == pytest.approx((700 + 512) / 2000)
    assert changed.recorded_route.startswith("kv_aware;score=")
    assert "matched=512" in changed.recorded_route
    assert changed.other_route.startswith("round_robin;score=1")
    shown = text(report(replay))
    assert changed.because in shown
    assert "measured 400 ms" in shown


@pytest.mark.parametrize("carries", [False, True])
def test_the_limits_of_what_is_said_are_said(carries: bool) -> None:
    shown = text(found("round_robin", carries=carries))
    assert ("Each choice is judged alone" in shown) is not carries
    assert ("carried along by a model" in shown) is carries


def test_what_is_not_known_is_not_made_up() -> None:
    turns = found("kv_aware", strategy="round_robin")
    assert turns.log.num_hashed == turns.log.num_choices  # here they are known; a gateway by turns does not hash
    past = Past("round_robin")
    few = [past.choose(request(f"q{n}"), [replica("a"), replica("b")], 1000.0 + n) for n in range(3)]
    replay = Replay({"kv_aware": RoutingSettings()}).read([*few, ended(few[0], None)])
    told = report(replay)
    assert told.estimate.measured is None
    assert not told.is_fitted
    assert "names no prompt's blocks" in text(told)
    assert "No stream of this log" in text(told)
    nothing = report(Replay({"kv_aware": RoutingSettings()}).read(few))
    assert nothing.others["kv_aware"].ttft is None
    assert "kv_aware" in text(nothing)


def test_a_log_that_keeps_a_part_of_the_candidates_says_so() -> None:
    many = [replica(f"r{n}", kv_capacity_tokens=UNBOUNDED) for n in range(30)]
    choice = Past().choose(request("q"), many, 1000.0)
    told = report(Replay({"round_robin": RoutingSettings("round_robin")}).read([choice]))
    assert told.log.num_cut == 1
    assert "more candidates than the log keeps" in text(told)


def test_it_is_json_and_back() -> None:
    told = found(*STRATEGIES, count=50)
    assert msgspec.json.decode(msgspec.json.encode(told), type=Report) == told
    assert set(told.others) == set(STRATEGIES)
    assert all(name in text(told) for name in STRATEGIES)


def test_times_are_without_requests_from_before_any_speed_was_measured() -> None:
    """A guess that is ten times too slow, for three requests of 200, would be all that a fit sees."""
    past, slow = Past(), [replica("a"), replica("b")]
    early = [past.choose(request(f"e{number}", 3000), slow, 900.0) for number in range(3)]
    later = list(traffic("kv_aware", 200, slower=2.0))
    told = report(Replay({"kv_aware": RoutingSettings("kv_aware")}).read([*early, *map(ended, early), *later]))
    alone = report(Replay({"kv_aware": RoutingSettings("kv_aware")}).read(later))
    assert told.estimate == alone.estimate
    assert told.recorded.ttft == alone.recorded.ttft
    assert told.log.num_requests == alone.log.num_requests + 3
    assert any("without 3 requests" in limit for limit in told.limits)


def test_where_no_speed_is_ever_measured_all_requests_are_timed() -> None:
    past, fleet = Past(), [replica("a"), replica("b")]
    choices = [past.choose(request(f"q{number}", 100 * number), fleet, 1000.0 + number) for number in range(1, 60)]
    told = report(Replay({}).read([*choices, *(ended(one, one.prompt_tokens / 1000) for one in choices)]))
    assert told.estimate.num_measured == len(choices)
    assert told.estimate.fitted is not None
    assert told.estimate.fitted.explained > 0.99
