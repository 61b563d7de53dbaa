"""Pools of one model whose replicas have roles: which gateways they are told to, how each is scaled, and replicas that
go from one to the other."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from penstock.cli.fleet_process import gateway_settings
from penstock.core.errors import ConfigError
from penstock.core.slo import Slo
from penstock.fleet.pool import Pool
from penstock.fleet.settings import FleetSettings, PoolSettings, replica_settings
from penstock.tenancy.fleet import PoolDemand
from penstock.tenancy.store import Store
from tests.fleet.fake_fleet import FakeFleet, leading

DECODE: dict[str, Any] = {"role": "decode", "min": 2, "max": 4}
PREFILL: dict[str, Any] = {"role": "prefill", "serves": "m", "min": 1, "max": 4}


def fleet_of(store: Store, **pools: dict[str, Any]) -> FakeFleet:
    fleet = FakeFleet(store)
    fleet.settings = FleetSettings(pools=pools)
    return fleet


def pools_of(fleet: FakeFleet) -> Counter[str]:
    return Counter(row.pool for row in fleet.store.fleet.replicas())


def roles_of(fleet: FakeFleet) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for row in fleet.store.fleet.replicas():
        found.setdefault(row.pool, Counter())[fleet.client.roles.get(row.url, "both")] += 1
    return found


def test_replicas_of_a_pool_have_its_role_and_the_served_models_name() -> None:
    prefill = FleetSettings(pools={"m@v1": DECODE, "m-prefill": PREFILL | {"serves": "m@v1"}}).pool_settings()
    settings = replica_settings("m-prefill", prefill["m-prefill"], Slo())
    assert (settings.model, settings.server.name, settings.server.role) == ("m", "m", "prefill")
    assert settings.engine.kv_port == 0
    plain = replica_settings("m", PoolSettings(), Slo())
    assert (plain.server.role, plain.engine.kv_port) == ("both", None)


@pytest.mark.parametrize(
    "pools",
    [
        {"m": {"role": "prefill"}},
        {"m": DECODE, "p": PREFILL | {"serves": "x"}},
        {"m": DECODE, "p": PREFILL, "q": PREFILL | {"serves": "p"}},
        {"m": DECODE, "d": {"serves": "m"}, "p": PREFILL | {"serves": "d"}},
    ],
)
def test_a_pool_serves_one_that_answers_by_itself(pools: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no pool that answers by itself"):
        FleetSettings(pools=pools).pool_settings()


def test_a_gateway_beside_knows_the_model_and_not_the_pool_of_its_prompts() -> None:
    settings = FleetSettings(pools={"m": DECODE, "p": PREFILL})
    assert list(gateway_settings(settings, "sqlite:///x").models) == ["m"]


async def test_gateways_are_told_of_both_pools_replicas_as_one_models(store: Store) -> None:
    fleet = fleet_of(store, m=DECODE, p=PREFILL)
    controller = await leading(fleet)
    await fleet.run(controller, 8)
    assert pools_of(fleet) == {"m": 2, "p": 1}
    assert [row.model for row in store.replicas.all()] == ["m"] * 3
    assert {one.pool: one.serves for one in store.fleet.pools()} == {"m": "", "p": "m"}


async def test_replicas_take_the_role_of_their_pool(store: Store) -> None:
    fleet = fleet_of(store, m=DECODE, p=PREFILL)
    controller = await leading(fleet)
    await fleet.run(controller, 10)
    assert roles_of(fleet) == {"m": {"decode": 2}, "p": {"prefill": 1}}
    fleet.settings = FleetSettings(pools={"m": {"min": 2, "max": 4}, "p": PREFILL})
    controller = await leading(fleet)
    await fleet.run(controller, 3)
    assert roles_of(fleet) == {"m": {"both": 2}, "p": {"prefill": 1}}
    assert sum(fleet.driver.started.values()) == 3


@pytest.mark.parametrize(("more", "num_started"), [({}, 4), ({"gpus": 1}, 5)], ids=["alike", "another shape"])
async def test_a_replica_that_one_pool_gives_up_becomes_the_others_if_it_has_its_shape(
    store: Store, more: dict[str, Any], num_started: int
) -> None:
    fleet = fleet_of(store, m=DECODE | {"min": 3, "max": 3}, p=PREFILL | {"max": 1} | more)
    controller = await leading(fleet)
    await fleet.run(controller, 8)
    assert pools_of(fleet) == {"m": 3, "p": 1}
    fleet.settings = FleetSettings(
        pools={"m": DECODE | {"min": 2, "max": 2}, "p": PREFILL | {"min": 2, "max": 2} | more}
    )
    controller = await leading(fleet)
    await fleet.run(controller, 12)
    assert pools_of(fleet) == {"m": 2, "p": 2}
    assert roles_of(fleet) == {"m": {"decode": 2}, "p": {"prefill": 2}}
    assert sum(fleet.driver.started.values()) == num_started


def test_a_prefill_pool_is_sized_by_prompts_alone() -> None:
    rows = [PoolDemand("g", "m", 1000.0, arrivals=0), PoolDemand("g", "m", 1010.0, arrivals=100, waiting=7, held=3)]
    seen = {}
    for role in ("decode", "prefill"):
        pool = Pool(role, PoolSettings(role=role, serves="m"), Slo())  # type: ignore[arg-type]
        for row in rows:
            row = PoolDemand(
                **{name: getattr(row, name) for name in row.__struct_fields__}
                | {"finished": row.arrivals, "prompt_tokens": row.arrivals * 500, "output_tokens": row.arrivals * 80}
            )
            pool.observe_demand([row], row.at)
        seen[role] = pool.observation([], {}, 1010.0).demand
    assert seen["prefill"].arrivals_per_s == seen["decode"].arrivals_per_s > 0
    assert seen["prefill"].prompt_tokens == seen["decode"].prompt_tokens == 500
    assert (seen["decode"].output_tokens, seen["prefill"].output_tokens) == (80, 1)
    assert (seen["decode"].waiting, seen["decode"].held) == (7, 3)
    assert (seen["prefill"].waiting, seen["prefill"].held) == (0, 0)
