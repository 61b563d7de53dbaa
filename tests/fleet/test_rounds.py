"""Recorded rounds of the policy: decided again, each gives exactly the decision that it gave."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest

from penstock.core.slo import Slo
from penstock.fleet.policy.decision import Decision
from penstock.fleet.policy.memory import PolicyMemory
from penstock.fleet.policy.observation import Demand, ForecastBand, PoolObservation
from penstock.fleet.policy.pool_policy import PoolPolicy
from penstock.fleet.rounds import PolicyRound, read_rounds, record
from penstock.fleet.settings import PoolSettings, Schedule, SpotSettings
from penstock.replay.scaling import DecideAgain
from tests.fleet.policy.fake_pool import RATE, SLO, FakePool, demand, views

LOADS = (0.5, 2.5, 6.0, 1.0, 0.0, 4.0)  # of one replica's most


class RecordingPolicy(PoolPolicy):
    """Keeps every round as the store would: as JSON."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.documents: list[str] = []

    def decide(self, observation: PoolObservation, memory: PolicyMemory, now: float) -> tuple[Decision, PolicyMemory]:
        decision, after = super().decide(observation, memory, now)
        self.documents.append(msgspec.json.encode(record(self, observation, memory, decision)).decode())
        return decision, after


def recorded_rounds(settings: PoolSettings, slo: Slo = SLO) -> list[str]:
    settings = replace(settings, down_cooldown_s=40.0)
    pool = FakePool(settings, slo=slo)
    policy = RecordingPolicy(settings, slo, pool.policy.profile)
    pool.policy = policy
    pool.add(views(max(1, settings.min)))
    for load in LOADS:
        pool.run(100, demand(load * RATE, active_sequences=10 * load, waiting=int(load)))
    return policy.documents


@pytest.mark.parametrize(
    "settings",
    [
        PoolSettings(min=1, max=20),
        PoolSettings(min=1, max=20, surge=3.0, price_per_hour=4.0, parked_price_per_hour=0.4),
        PoolSettings(min=2, max=20, zones=["a", "b"], spot=SpotSettings(share=0.5, price_per_hour=1.0)),
        PoolSettings(min=0, max=20, idle_s=30.0, schedules=[Schedule(days=["mon"], start="00:01", max=3)]),
        PoolSettings(min=1, max=9, scale_on={"active_sequences": 8.0}, up_cooldown_s=10.0),
    ],
    ids=["plain", "surge", "spot", "zero", "thresholds"],
)
def test_recorded_rounds_are_decided_again_exactly_as_they_were(settings: PoolSettings) -> None:
    documents = recorded_rounds(settings)
    rounds = read_rounds(documents)
    assert len(rounds) == 100 * len(LOADS)
    assert sum(bool(each.decision.actions) for each in rounds) >= 2
    again = DecideAgain()
    assert [again(each) for each in rounds] == [each.decision for each in rounds]
    one_by_one = [each.policy().decide(each.observation, each.memory, each.decision.at)[0] for each in rounds[::25]]
    assert one_by_one == [each.decision for each in rounds[::25]]


def test_round_has_only_settings_that_are_not_defaults_and_that_the_policy_reads() -> None:
    document = json.loads(recorded_rounds(PoolSettings(model="m", min=2, hold_s=5.0, spot=SpotSettings(share=0.5)))[0])
    assert document["settings"]["min"] == 2
    assert document["settings"]["spot"]["share"] == 0.5
    assert set(document["settings"]) == {"min", "spot", "down_cooldown_s"}
    assert len(json.dumps(document)) < 2000


def test_rounds_of_another_version_are_left_out() -> None:
    good = PolicyRound(PoolObservation("p", Demand(), forecast=(ForecastBand(1, 1, 1, 1),)), PolicyMemory(), _NONE)
    assert read_rounds(["{}", '{"observation": 3}', msgspec.json.encode(good).decode()]) == [good]


_NONE = Decision("p", 1.0, 1)
