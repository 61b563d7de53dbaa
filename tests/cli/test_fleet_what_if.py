"""`penstock fleet what-if` and `penstock replay fleet`, over a store with an hour of a pool's recorded demand."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import msgspec
import pytest

from penstock.cli.main import main, parser, run
from penstock.core.errors import ConfigError
from penstock.core.slo import Slo
from penstock.fleet.policy.memory import PolicyMemory
from penstock.fleet.policy.observation import Demand, Durations, PoolObservation, ReplicaState, ReplicaView
from penstock.fleet.policy.pool_policy import PoolPolicy
from penstock.fleet.policy.profile import CapacityProfile, ReplicaCosts
from penstock.fleet.rounds import record
from penstock.fleet.settings import PoolSettings
from penstock.tenancy import fleet as rows
from penstock.tenancy.fleet import FleetSample
from penstock.tenancy.store import open_store

pytestmark = pytest.mark.slow

BEGAN = time.time() // 60 * 60 - 9000.0
MINUTES = 60
COSTS = ReplicaCosts(fixed_s=1e-3, read_s=4e-3, linear_token_s=1e-4, sequence_s=2e-5, kv_tokens=600_000)
SETTINGS = PoolSettings(min=1, max=8, price_per_hour=2.0, parked=0)
SLO = Slo(ttft_s=1.0, tpot_s=0.05)


def rate(minute: int) -> float:
    return 20.0 - 15.0 * math.cos(2 * math.pi * minute / MINUTES)


def write_rounds(url: str, pool: str = "p") -> None:
    """What a controller would have left, with so many replicas as the policy wanted, at once."""
    policy = PoolPolicy(SETTINGS, SLO, CapacityProfile(COSTS))
    memory, active = PolicyMemory(), 1
    with open_store(url) as store:
        lease = store.fleet.take_lease("f", "a", store.fleet.lease("f"))
        assert lease is not None
        with store.fleet.fenced("f", lease) as execute:
            for minute in range(MINUTES):
                now, per_s = BEGAN + 60.0 * minute, rate(minute)
                views = tuple(
                    ReplicaView(f"r{index}", ReplicaState.ACTIVE, BEGAN, started_at=BEGAN) for index in range(active)
                )
                demand = Demand(arrivals_per_s=per_s, prompt_tokens=500, output_tokens=50, in_flight=int(per_s))
                observation = PoolObservation(pool, demand, views, Durations(start_s=20.0))
                before = memory
                decision, memory = policy.decide(observation, before, now)
                rows.write_round(execute, now, pool, record(policy, observation, before, decision))
                if decision.reason:
                    rows.write_decision(execute, now, pool, decision)
                sample = FleetSample(
                    now,
                    pool,
                    {"active": active},
                    per_s,
                    500,
                    50,
                    wanted=decision.wanted,
                    cost=active / 30,
                    seconds={"active": 60.0 * active},
                    in_slo=int(59 * per_s),
                    out_of_slo=int(per_s),
                    arrivals=int(60 * per_s),
                    refused=minute % 2,
                )
                rows.write_sample(execute, sample)
                active = decision.wanted


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = f"sqlite:///{tmp_path_factory.mktemp('fleet') / 'fleet.db'}"
    write_rounds(url)
    return url


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    main([*words])
    return capsys.readouterr().out


def test_alternatives_stand_beside_what_was_recorded_and_what_is_configured(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    alternatives = ["--set", "min=5", "--set", "spot.share=0.5,spot.price_per_hour=0.5", "--device-kind", "h9=6,4"]
    text = said(capsys, "fleet", "what-if", "--store", url, "--json", *alternatives, "--policy", "static")
    document = json.loads(text)
    found = {each["name"]: each for each in document["alternatives"]}
    spot = "spot.share=0.5,spot.price_per_hour=0.5"
    assert list(found) == ["as recorded", "as configured", "min=5", spot, "h9", "static"]
    recorded, configured = found["as recorded"], found["as configured"]
    assert recorded["in_slo"] == pytest.approx(59 / 60, rel=0.01)
    assert recorded["cost"] == pytest.approx(2 * recorded["replica_hours"])
    assert recorded["decisions"] > 0
    assert configured["replica_hours"] == pytest.approx(recorded["replica_hours"], rel=0.25)
    assert configured["cost"] == pytest.approx(2 * configured["replica_hours"])
    assert configured["in_slo"] > 0.99
    assert found["min=5"]["hours"]["active"] >= 5 * (MINUTES - 1) / 60 * 0.99
    assert found["min=5"]["cost"] > 1.2 * configured["cost"]
    assert 0 < found[spot]["spot_hours"] <= 0.5 * found[spot]["replica_hours"]
    assert found[spot]["cost"] < 0.9 * configured["cost"]
    assert found["h9"]["replica_hours"] < 0.5 * configured["replica_hours"]
    assert found["static"]["decisions"] <= 1
    assert document["requests"] == sum(int(60 * rate(minute)) for minute in range(1, MINUTES))
    assert any("30 refused" in note for note in document["notes"])
    assert any("spot" in note for note in document["notes"])


def test_table_says_what_changes_and_what_is_not_known(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "fleet", "what-if", "p", "--store", url, "--set", "min=8,max=8").splitlines()
    assert lines[0].startswith("p: ")
    assert [line.split("  ")[0] for line in lines[2:6]] == ["", "as recorded", "as configured", "min=8,max=8"]
    assert lines[5].split()[2].startswith("+")
    assert lines[-1].startswith("Not known: ")


def test_fleet_file_says_how_the_pool_is_configured(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "fleet.yaml"
    config.write_text(f"store: {url}\nslo: {{ttft_s: 1.0}}\npools: {{p: {{min: 7, max: 8}}, q: {{}}}}\n")
    document = json.loads(said(capsys, "fleet", "what-if", "p", "--config", str(config), "--json"))
    (configured,) = [each for each in document["alternatives"] if each["name"] == "as configured"]
    assert configured["hours"]["active"] > 6.9 * (MINUTES - 1) / 60
    assert "parked" not in configured["hours"]  # replicas have told that they cannot be


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--set", "mni=2"), "did you mean 'min'"),
        (("--set", "slo.ttft_p95_s=2"), "unknown setting 'slo.ttft_p95_s'"),
        (("--set", "min=-1"), "setting 'min'"),
        (("--set", "min=9"), "at least 9 and at most 8"),
        (("--set", "spot.share=2"), "setting 'spot.share'"),
        (("--set", "model=gpt"), "says nothing about how many"),
        (("--set", "min"), "is not NAME=VALUE"),
        (("--set", "slo=3"), "the SLO has parts"),
        (("--set", "speed=0"), "speed is a positive number"),
        (("--device-kind", "h9"), "is not NAME=PRICE"),
        (("--device-kind", "h9=cheap"), "setting 'price_per_hour'"),
        (("--policy", "oracle"), "no policy 'oracle'"),
        (("--since", "1s"), "no demand is recorded"),
        (("pp",), "no pool 'pp'; did you mean 'p'"),
    ],
)
def test_errors_name_what_is_wrong(url: str, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _run_what_if(url, *words)


def _run_what_if(url: str, *words: str) -> None:
    run(parser().parse_args(["fleet", "what-if", *words, "--store", url]))


def test_pool_must_be_named_where_there_are_two(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'fleet.db'}"
    with pytest.raises(ConfigError, match="no demand is recorded"):
        _run_what_if(url)
    write_rounds(url, "a")
    write_rounds(url, "b")
    with pytest.raises(ConfigError, match="There are a, b"):
        _run_what_if(url)


def test_replay_of_the_recorded_policy_is_exact_and_others_differ(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["replay", "fleet", "--store", url, "--set", "max=8", "--set", "min=3", "--policy", "hpa"]
    found = json.loads(said(capsys, *words, "--json"))
    assert found["num_exact"] == found["num_rounds"] == MINUTES
    as_it_was, min_3, hpa = found["policies"]
    assert (as_it_was["same"], as_it_was["differences"]) == (1.0, [])
    assert as_it_was["mean_wanted"] == found["recorded"]["mean_wanted"]
    assert min_3["more"] > 0
    assert min_3["mean_wanted"] > found["recorded"]["mean_wanted"]
    first = min_3["differences"][0]
    assert (first["recorded"]["wanted"], first["other"]["wanted"]) == (1, 3)
    assert first["other"]["reason"].startswith("the pool has at least 3")
    assert hpa["same"] < 1.0
    text = said(capsys, *words, "--changes", "1")
    assert "decides all of them again exactly as it did" in text
    assert "min=3 decides otherwise" in text
    assert "max=8 decides otherwise" not in text


def test_replay_by_default_asks_the_policies_that_others_use(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(said(capsys, "replay", "fleet", "p", "--store", url, "--json"))
    assert [each["name"] for each in found["policies"]] == ["hpa", "keda", "planner"]


def test_replay_says_that_another_version_was_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"sqlite:///{tmp_path / 'fleet.db'}"
    write_rounds(url)
    with open_store(url) as store, store._database.writing() as execute:
        ((at, document),) = execute("SELECT at, document FROM fleet_rounds ORDER BY at LIMIT 1", ())
        changed = msgspec.json.decode(document)
        changed["decision"]["wanted"] = 6
        execute("UPDATE fleet_rounds SET document = ? WHERE at = ?", (json.dumps(changed), at))
    text = said(capsys, "replay", "fleet", "--store", url, "--set", "max=8")
    assert "1 of them the recorded policy decides otherwise now: another version of it was recorded" in text
