"""Copies for both versions: their order, what is told of them, and when they give way."""

from __future__ import annotations

from math import log
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.core.rollout import Arm, Metric
from penstock.gateway.rollouts.observation import Timing, pair_ratios
from penstock.gateway.settings.gateway import ModelSettings
from penstock.router.routes import Target
from tests.gateway.provider import Provider, providing
from tests.gateway.rollouts.measuring import ORDER, ask, rolling_out, settle
from tests.server.replica import NAME, Replica
from tests.waiting import eventually


def test_a_copied_request_goes_to_both_versions_in_either_order_one_after_the_other() -> None:
    order: list[str] = []

    def heard(name: str) -> Any:
        class Heard(list[Any]):
            def append(self, asked: Any) -> None:
                order.append(name)
                super().append(asked)

        return Heard()

    with (
        providing(says="one", asked=heard("old")) as one,
        providing(says="two", asked=heard("new")) as two,
        rolling_out(one, two, shadow=1.0) as (gateway, seen),
    ):
        gateway.call(lambda: gateway.app.random.seed(3))
        for _ in range(12):
            assert ask(gateway) == "one"
            settle(gateway)
        copies = [tuple(order[place : place + 3]) for place in range(0, 36, 3)]
        assert set(copies) == {("old", "old", "new"), ("old", "new", "old")}
        for arm in (Arm.OLD_COPY, Arm.NEW_COPY):
            assert seen.values(arm, Metric.ERRORS) == [0.0] * 12
        assert len(seen.of(Arm.PAIR)) == 12
        assert Metric.LATENCY in {metric for metric, _ in seen.of(Arm.PAIR)[0].values}
        assert len(gateway.ledger.usages) == 12  # nobody pays for a copy


def test_copies_are_compared_with_the_clients_answer() -> None:
    with (
        providing(says="one") as one,
        providing(says="two") as two,
        rolling_out(one, two, shadow=1.0) as (
            gateway,
            seen,
        ),
    ):
        for stream in (False, True):
            ask(gateway, stream=stream)
            settle(gateway)
        assert seen.values(Arm.OLD_COPY, Metric.DISAGREEMENT) == [0.0, 0.0]
        assert seen.values(Arm.NEW_COPY, Metric.DISAGREEMENT) == [1.0, 1.0]
        assert gateway.app.rollouts.kept_bytes == 0


def test_without_a_control_only_the_new_version_is_sent_a_copy() -> None:
    order = replace(ORDER, control=False)
    with providing() as one, providing() as two, rolling_out(one, two, order, shadow=1.0) as (gateway, seen):
        ask(gateway)
        settle(gateway)
        assert (len(one.asked), len(two.asked)) == (1, 1)
        assert seen.of(Arm.PAIR) == []


def test_a_copy_that_fails_is_an_error_of_its_version_and_no_pair() -> None:
    with providing() as one, providing(status=500) as two, rolling_out(one, two, shadow=1.0) as (gateway, seen):
        ask(gateway)
        settle(gateway)
        assert seen.values(Arm.NEW_COPY, Metric.ERRORS) == [1.0]
        assert seen.values(Arm.OLD_COPY, Metric.ERRORS) == [0.0]
        assert seen.of(Arm.PAIR) == []
        assert seen.values(Arm.NEW_COPY, Metric.DISAGREEMENT) == []


def test_a_copy_that_a_version_refuses_is_a_refusal() -> None:
    with providing() as one, providing(status=429) as two, rolling_out(one, two, shadow=1.0) as (gateway, seen):
        ask(gateway)
        settle(gateway)
        assert seen.values(Arm.NEW_COPY, Metric.REFUSALS) == [1.0]
        assert seen.values(Arm.NEW_COPY, Metric.ERRORS) == [0.0]


def test_pairs_are_cut_off_when_a_client_has_to_wait_and_say_nothing() -> None:
    with providing() as one, providing(dawdles=True) as two, rolling_out(one, two, shadow=1.0) as (gateway, seen):
        ask(gateway)
        eventually(lambda: len(two.asked) == 1)
        gateway.call(lambda: gateway.app.shadows.give_way("m@v2"))
        assert gateway.app.shadows.num_open == 0
        assert seen.of(Arm.NEW_COPY) == seen.of(Arm.PAIR) == []
        two.may_answer.set()


def test_a_copy_that_never_ends_is_an_error_of_its_version() -> None:
    with providing() as one, providing(dawdles=True) as two, rolling_out(one, two, shadow=1.0) as (gateway, seen):
        ask(gateway)
        eventually(lambda: len(two.asked) == 1)
        gateway.advance(60)
        eventually(lambda: seen.values(Arm.NEW_COPY, Metric.ERRORS), lambda found: found == [1.0])
        two.may_answer.set()


def test_copies_to_penstock_replicas_are_cached_apart_and_say_what_they_took(replica_at_hand: Replica) -> None:
    there = Provider(port=replica_at_hand.port)
    with providing(says="old") as one, rolling_out(one, there, shadow=1.0, served_as=NAME) as (gateway, seen):
        ask(gateway, model="m@v2")  # now a client's prompt is in the cache
        new = Target("m@v2", "m@v2")
        for stream in (True, False, True):
            # Its last report may still speak of what has ended, and then there is no room for a copy.
            eventually(lambda: gateway.call(lambda: gateway.app.shadows.free_replica(new)))
            ask(gateway, stream=stream)
            settle(gateway)
        first, *others = [each.timing for each in seen.of(Arm.NEW_COPY) if each.timing is not None]
        assert len(others) == 2
        assert all(other.uncached_tokens < first.uncached_tokens for other in others)
        assert [timing.ttft_s is None for timing in (first, *others)] == [False, True, False]
        assert all((timing.device_s or 0.0) > 0.0 for timing in (first, *others))


def test_a_judge_an_embedder_and_both_versions_scores_say_how_answers_differ() -> None:
    order = replace(ORDER, embedder="e", judge="j", scores=True)
    with (
        providing(says="one", logprobs=[-1.0, -1.0, -0.5, -0.5]) as one,
        providing(says="two", logprobs=[-1.0, -1.0, -0.75, -0.25]) as two,
        providing(vectors={"one": [1.0, 0.0], "two": [0.6, 0.8]}) as vectors,
        providing(says="tie") as judge,
    ):
        more = {"e": ModelSettings(replicas=[vectors.url]), "j": ModelSettings(replicas=[judge.url])}
        with rolling_out(one, two, order, shadow=1.0, more=more) as (gateway, seen):
            assert ask(gateway) == "one"
            settle(gateway)
            assert seen.values(Arm.OLD_COPY, Metric.DISAGREEMENT) == [0.0]
            assert seen.values(Arm.NEW_COPY, Metric.DISAGREEMENT) == [pytest.approx(0.4)]
            assert seen.values(Arm.OLD_COPY, Metric.JUDGED_WORSE) == [0.5]
            assert seen.values(Arm.NEW_COPY, Metric.JUDGED_WORSE) == [0.5]
            assert seen.values(Arm.OLD_COPY, Metric.DIVERGENCE) == [0.0]
            assert seen.values(Arm.NEW_COPY, Metric.DIVERGENCE) == [pytest.approx(0.25)]
            assert len(gateway.ledger.usages) == 1
            judge.says = "A"  # whichever comes first
            gateway.call(lambda: gateway.app.random.seed(1))
            for _ in range(10):
                ask(gateway)
                settle(gateway)
            assert set(seen.values(Arm.NEW_COPY, Metric.JUDGED_WORSE)[1:]) == {0.0, 1.0}


def test_a_pair_is_a_ratio_where_conditions_were_alike() -> None:
    old = Timing(2, 100, 11, 0.1, 1.1, 0.5)
    new = Timing(3, 90, 21, 0.2, 2.2, 0.5)
    assert dict(pair_ratios(old, new)) == {
        Metric.TTFT: pytest.approx(log(2)),
        Metric.TPOT: pytest.approx(0.0),
        Metric.LATENCY: pytest.approx(log(2)),
        Metric.OUTPUT_TOKENS: pytest.approx(log(21 / 11)),
        Metric.DEVICE_TIME: pytest.approx(log(11 / 21)),
    }
    assert {metric for metric, _ in pair_ratios(old, new._replace(in_flight=9))} == {Metric.OUTPUT_TOKENS}
    warmer = {metric for metric, _ in pair_ratios(old, new._replace(uncached_tokens=5))}
    assert warmer == {Metric.TPOT, Metric.LATENCY, Metric.OUTPUT_TOKENS}
