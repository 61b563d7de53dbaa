"""Clients' answers of both versions: what is measured of them, whose are left out, and who stays."""

from __future__ import annotations

import contextlib
import time

import openai
import pytest
from msgspec.structs import replace

from penstock.core.rollout import Arm, Metric
from penstock.gateway.records.facts import Ending, RequestFacts
from penstock.gateway.rollouts.following import FollowedRollout, Rollouts
from penstock.gateway.rollouts.observed_request import pipeline_ended
from penstock.gateway.settings.gateway import ModelSettings
from penstock.router.routes import Route, RouteTable, Version
from tests.gateway.provider import providing
from tests.gateway.rollouts.measuring import ORDER, Seen, ask, change, post, rolling_out, settle
from tests.waiting import eventually


def test_answers_of_both_versions_are_measured_by_their_arms() -> None:
    with providing(says="one") as one, providing(says="two") as two:
        order = replace(ORDER, prices={"v1": 3.6, "v2": 7.2})
        with rolling_out(one, two, order, weights=(50, 50)) as (gateway, seen):
            gateway.call(lambda: gateway.app.random.seed(1))
            said = [ask(gateway, stream=True) for _ in range(20)]
            settle(gateway)
            for arm, text in ((Arm.OLD, "one"), (Arm.NEW, "two")):
                found = seen.of(arm)
                assert len(found) == said.count(text) > 0
                assert seen.values(arm, Metric.ERRORS) == [0.0] * len(found)
                assert all(each.order.step == 1 and each.request_id and each.tenant == "anonymous" for each in found)
                timing = found[0].timing
                assert timing is not None
                assert (timing.uncached_tokens, timing.output_tokens, timing.in_flight) == (3, 1, 0)
                assert timing.ttft_s is not None
                assert timing.ttft_s > 0
                assert timing.hour_price == {"one": 3.6, "two": 7.2}[text]
                assert timing.cost == pytest.approx((3 * 1.0 + 1 * 2.0) / 1e6)


def test_a_model_without_a_rollout_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    with providing() as one, providing() as two, providing(says="other") as other:
        more = {"x": ModelSettings(replicas=[other.url])}
        with rolling_out(one, two, more=more) as (gateway, seen):
            made: list[str] = []
            begin = FollowedRollout.opted_out
            monkeypatch.setattr(
                FollowedRollout, "opted_out", lambda self, tenant: made.append(self.order.id) or begin(self, tenant)
            )
            assert ask(gateway, model="x") == "other"
            settle(gateway)
            made.clear()  # what a new tenant may see was worked out once
            assert ask(gateway, model="x") == "other"
            assert (seen.all, made) == ([], [])


def test_who_asks_for_a_version_by_name_is_no_sample_of_its_traffic() -> None:
    with providing(says="one") as one, providing(says="two") as two, rolling_out(one, two) as (gateway, seen):
        assert ask(gateway, model="m@v2") == "two"
        assert ask(gateway, model="m@v1") == "one"
        settle(gateway)
        assert seen.all == []


def test_errors_are_counted_at_once_and_times_when_caches_have_settled() -> None:
    order = replace(ORDER, settle_until=time.time() + 3600)
    with (
        providing() as one,
        providing(status=500) as two,
        rolling_out(one, two, order, weights=(0, 1)) as (
            gateway,
            seen,
        ),
    ):
        with pytest.raises(openai.InternalServerError):
            ask(gateway)
        change(gateway, v1=1, v2=0)
        ask(gateway)
        settle(gateway)
        assert seen.values(Arm.NEW, Metric.ERRORS) == [1.0]
        assert seen.values(Arm.OLD, Metric.ERRORS) == [0.0]
        assert [each.timing for each in seen.all] == [None, None]


def test_an_error_that_another_version_made_good_counts_for_the_one_that_made_it() -> None:
    with providing(says="one") as one, providing(status=500) as two:
        with rolling_out(one, two, weights=(0, 1), fallback=["m@v1"]) as (gateway, seen):
            assert ask(gateway) == "one"
            settle(gateway)
        assert seen.values(Arm.NEW, Metric.ERRORS) == [1.0]
        assert seen.of(Arm.OLD) == []


def test_what_a_replica_refuses_counts_and_what_its_tenant_may_not_does_not() -> None:
    with providing() as one, providing(status=400) as two, rolling_out(one, two, weights=(0, 1)) as (gateway, seen):
        key = gateway.add_tenant("acme", limits={"requests_per_minute": 1})
        with pytest.raises(openai.BadRequestError):
            ask(gateway, key=key)
        with pytest.raises(openai.RateLimitError):
            ask(gateway, key=key)
        settle(gateway)
        assert seen.values(Arm.NEW, Metric.REFUSALS) == [1.0]
        assert seen.values(Arm.NEW, Metric.ERRORS) == [0.0]


def test_a_replica_that_has_just_come_back_is_not_timed() -> None:
    with providing() as one, providing() as two, rolling_out(one, two) as (gateway, seen):
        (replica,) = [each for each in gateway.app.replicas.values() if each.model == "m@v1"]
        gateway.call(lambda: replica.health._slow_start.begin(gateway.app.now()))
        ask(gateway)
        gateway.advance(3600)
        ask(gateway)
        settle(gateway)
        assert [each.timing is None for each in seen.of(Arm.OLD)] == [True, False]


@pytest.mark.parametrize("by_order", [False, True])
def test_a_tenant_that_stays_is_answered_by_the_old_version_and_never_copied(by_order: bool) -> None:
    order = replace(ORDER, staying=("calm",) if by_order else ())
    with contextlib.ExitStack() as stack:
        one, two = (stack.enter_context(providing(says=text)) for text in ("one", "two"))
        with rolling_out(one, two, order, weights=(1, 99), shadow=1.0) as (gateway, seen):
            calm = gateway.add_tenant("calm", stays=not by_order)
            other = gateway.add_tenant("other")
            assert {ask(gateway, key=calm, user=f"user {number}") for number in range(10)} == {"one"}
            settle(gateway)
            assert two.asked == []
            assert seen.all == []
            assert "two" in {ask(gateway, key=other, user=f"user {number}") for number in range(10)}


def test_a_tenant_stays_with_rules_and_fallbacks_too() -> None:
    with providing(says="one") as one, providing(says="two") as two, providing(status=500) as broken:
        more = {
            "auto": ModelSettings(rules=[{"name": "all", "max_prompt_tokens": 10_000, "to": "m"}], default="m"),
            "weak": ModelSettings(replicas=[broken.url], fallback=["m"]),
        }
        with rolling_out(one, two, weights=(0, 1), more=more) as (gateway, _):
            calm, other = gateway.add_tenant("calm", stays=True), gateway.add_tenant("other")
            assert [ask(gateway, key=calm, model=model) for model in ("m", "auto", "weak")] == ["one"] * 3
            assert [ask(gateway, key=other, model=model) for model in ("m", "auto", "weak")] == ["two"] * 3


def test_a_rollout_that_is_over_is_not_measured_and_keeps_nobody() -> None:
    with (
        providing(says="one") as one,
        providing(says="two") as two,
        rolling_out(one, two, weights=(0, 1)) as (
            gateway,
            seen,
        ),
    ):
        key = gateway.add_tenant("calm", stays=True)
        assert ask(gateway, key=key) == "one"
        gateway.call(lambda: gateway.app.follow([replace(ORDER, is_over=True)]))
        assert ask(gateway, key=key) == "two"
        settle(gateway)
        assert seen.all == []


def test_what_nothing_is_decided_by_is_not_measured_and_who_stays_does() -> None:
    with (
        providing(says="one") as one,
        providing(says="two") as two,
        rolling_out(one, two, replace(ORDER, is_measured=False), weights=(0, 1), shadow=0.0) as (gateway, seen),
    ):
        calm, other = gateway.add_tenant("calm", stays=True), gateway.add_tenant("other")
        assert (ask(gateway, key=calm), ask(gateway, key=other)) == ("one", "two")
        settle(gateway)
        assert seen.all == []


def test_while_the_old_version_is_held_the_new_one_is_everybodys_and_is_measured() -> None:
    with (
        providing(says="one") as one,
        providing(says="two") as two,
        rolling_out(one, two, replace(ORDER, is_held=True), weights=(0, 1)) as (gateway, seen),
    ):
        calm, other = gateway.add_tenant("calm", stays=True), gateway.add_tenant("other")
        assert (ask(gateway, key=calm), ask(gateway, key=other)) == ("two", "two")
        settle(gateway)
        assert {(each.arm, each.tenant) for each in seen.all} == {(Arm.NEW, "other")}


def test_guided_output_and_tool_calls_of_clients_are_checked() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    guided = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tools = [{"type": "function", "function": {"name": "look", "parameters": schema}}]
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a": "no"}'}}
    with contextlib.ExitStack() as stack:
        one, two = (stack.enter_context(providing(says=text)) for text in ('{"a": 1}', "{'a': 1}"))
        with rolling_out(one, two) as (gateway, seen):
            ask(gateway, response_format=guided)
            ask(gateway, response_format=guided, stream=True)
            eventually(lambda: seen.values(Arm.OLD, Metric.INVALID_GUIDED), lambda found: found == [0.0, 0.0])
            change(gateway, v1=0, v2=1)
            ask(gateway, response_format=guided)
            eventually(lambda: seen.values(Arm.NEW, Metric.INVALID_GUIDED), lambda found: found == [1.0])
            two.message = {"role": "assistant", "content": None, "tool_calls": [call]}
            ask(gateway, tools=tools)
            eventually(lambda: seen.values(Arm.NEW, Metric.INVALID_TOOLS), lambda found: found == [1.0])
            assert gateway.app.rollouts.kept_bytes == 0


def test_an_answer_that_is_too_large_is_not_kept() -> None:
    with providing(says="x" * (300 << 10)) as one, providing() as two, rolling_out(one, two) as (gateway, seen):
        ask(gateway, response_format={"type": "json_object"})
        settle(gateway)
        assert gateway.app.rollouts.kept_bytes == 0
        assert seen.values(Arm.OLD, Metric.INVALID_GUIDED) == []
        assert seen.values(Arm.OLD, Metric.ERRORS) == [0.0]


def test_a_gateway_that_keeps_no_feedback_says_so() -> None:
    with providing() as one, providing() as two, rolling_out(one, two) as (gateway, _):
        status, _, said = post(gateway, "/v1/penstock/feedback", {"request_id": "x", "score": "good"})
        assert (status, said["error"]["code"]) == (404, "not_found")


def test_a_version_that_is_a_pipeline_is_measured_by_its_runs() -> None:
    rollouts, seen = Rollouts({}, lambda: 0.0, lambda: 1000.0), Seen()
    rollouts.sink = seen
    versions = (Version("v1", 1.0, pipeline="p"), Version("v2", 1.0, pipeline="q"))
    rollouts.apply([replace(ORDER, settle_until=995.0)])
    table = RouteTable([Route("p", is_pipeline=True), Route("q", is_pipeline=True), Route("m", versions=versions)])
    rollouts.use(table)
    for ending, version, total_s in (
        (Ending.OK, "m@v2", 2.0),
        (Ending.OK, "m@v2", 20.0),  # it began before the step had settled
        (Ending.FAILED, "m@v1", 2.0),
        (Ending.REFUSED, "m@v1", 2.0),
        (Ending.OK, "", 2.0),
    ):
        facts = RequestFacts("id", "chat/completions", ending, route="m", version=version, total_s=total_s)
        pipeline_ended(rollouts.by_route["m"], facts)
    assert seen.values(Arm.NEW, Metric.ERRORS) == [0.0, 0.0]
    assert seen.values(Arm.OLD, Metric.ERRORS) == [1.0]
    assert [each.timing is None for each in seen.all] == [False, True, True]
