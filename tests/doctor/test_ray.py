"""`penstock doctor` of a Ray cluster, on the fake one: the real one is in tests/ray."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock import __version__
from penstock.core.config import build
from penstock.core.errors import ConfigError
from penstock.doctor.findings import Finding
from penstock.doctor.fleet import fleets_seen, store_places
from penstock.doctor.ray import RayUse, check_fleets, check_reports, check_version, look, use_of_fleet
from penstock.fleet.drivers.driver import ReplicaSpec
from penstock.fleet.drivers.ray import RayDriver
from penstock.fleet.drivers.ray_cluster import ActorView, GroupView, NodeReport, NodeView
from penstock.fleet.settings import FleetSettings, replica_settings
from penstock.tenancy.fleet import PoolStatus, write_pool
from penstock.tenancy.store import open_store
from tests.ray.fake_cluster import FakeRayCluster

GOOD = NodeReport("", python="3.12.1", ray="2.60.0", penstock=__version__, has_torch=True)


@pytest.fixture
def cluster() -> FakeRayCluster:
    nodes = {zone: {"CPU": 4.0, "GPU": 2.0, f"zone:{zone}": 1000.0} for zone in "ab"}
    return FakeRayCluster({"head": {"memory": 1.0}, **nodes})


def fleet(*, ray: dict[str, Any] | None = None, **pool: Any) -> FleetSettings:
    return build(FleetSettings, {"driver": "ray", "ray": ray or {}, "pools": {"smollm2": pool}})


def use(settings: FleetSettings, store: str = "") -> RayUse:
    found = use_of_fleet(settings, store)
    assert found is not None
    return found


async def found(cluster: FakeRayCluster, use: RayUse) -> dict[str, list[Finding]]:
    by_name: dict[str, list[Finding]] = {}
    async for finding in look(cluster, use):
        by_name.setdefault(finding.name, []).append(finding)
    return by_name


def verdicts(findings: Iterable[Finding]) -> list[str]:
    return [one.verdict for one in findings]


async def test_a_cluster_that_has_all_a_fleet_needs_has_nothing_to_fix(cluster: FakeRayCluster) -> None:
    findings = await found(cluster, use(fleet(zones=["a", "b"], gpus=1)))
    assert findings.keys() == {"ray", "nodes", "zones", "gpus", "room", "versions", "clock"}
    assert {one.verdict for every in findings.values() for one in every} == {"ok"}
    assert findings["zones"][0].says == "a (1 node), b (1 node)"
    assert findings["gpus"][0].says == "4 on 2 nodes, at most 2 on one"
    assert findings["room"][0].says == "smollm2: nodes have what a replica takes in zone a; zone b"
    assert findings["versions"][0].says == f"2 nodes with penstock {__version__}, Ray 2.60.0, Python 3.12.1"
    assert cluster.probed == [(["a", "b"], {})]  # no replica can be placed on the head


async def test_a_cluster_that_cannot_be_reached_is_one_line(cluster: FakeRayCluster) -> None:
    cluster.is_down = True
    findings = await found(cluster, RayUse("192.0.2.2:6379"))
    assert {name: verdicts(every) for name, every in findings.items()} == {"ray": ["fail"]}
    assert "192.0.2.2:6379: Ray did not answer" in findings["ray"][0].says
    assert findings["ray"][0].hint


async def test_nodes_that_are_lost_or_drain_are_told(cluster: FakeRayCluster) -> None:
    await cluster.lose_node("a")
    await cluster.drain_node("b", time.time() + 1000)
    findings = await found(cluster, RayUse())
    none, lost, draining = findings["nodes"]
    assert (none.verdict, lost.verdict, draining.verdict) == ("ok", "warn", "warn")  # the head takes new work
    assert lost.says == "node a (a) ended without notice: it was lost"
    assert draining.says.startswith("b (b) is draining and goes in ")
    await cluster.lose_node("head")
    await cluster.drain_node("b", 0.0)
    findings = await found(cluster, RayUse())
    assert findings["nodes"][0].says == "of 1 node alive none takes new work"
    assert findings["nodes"][0].verdict == "fail"
    assert "2 nodes, such as head (head), ended" in findings["nodes"][1].says
    assert "nobody said when" in findings["nodes"][2].says
    assert cluster.probed[-1] == ([], {})


async def test_a_node_that_somebody_took_away_is_no_finding() -> None:
    class Scaled(FakeRayCluster):
        async def nodes(self) -> list[NodeView]:
            return [replace(one, is_expected_death=not one.is_alive) for one in await super().nodes()]

    cluster = Scaled({"one": {"CPU": 1.0}, "two": {"CPU": 1.0}})
    await cluster.lose_node("two")
    assert verdicts((await found(cluster, RayUse()))["nodes"]) == ["ok"]


async def test_zones_and_gpus_that_no_node_has_are_told_with_what_would_work(cluster: FakeRayCluster) -> None:
    (good, lacking) = (await found(cluster, use(fleet(zones=["a", "c"]))))["room"]
    assert (good.verdict, lacking.verdict) == ("ok", "warn")
    assert lacking.says == "smollm2: no node has CPU 1, zone:c 0.001 in zone c"
    assert lacking.hint.startswith("no node has the resource zone:c: see `ray start --resources`")
    (lacking,) = (await found(cluster, use(fleet(gpus=4))))["room"]
    assert (lacking.verdict, lacking.says) == ("fail", "smollm2: no node has CPU 1, GPU 4")
    assert "none has more than 2 GPUs: `gpus: 2` would fit, or add a node with 4" in lacking.hint
    marked = fleet(spot={"share": 0.5}, ray={"capacity_prefix": "kind:"})
    assert [one.says.rpartition(" in ")[2] for one in (await found(cluster, use(marked)))["room"]] == [
        "on_demand",
        "spot",
    ]
    await cluster.add_node({"CPU": 1.0})
    findings = await found(cluster, RayUse())
    assert "node-3 (node-3) without a resource zone:…" in findings["zones"][1].says


async def test_a_replica_over_several_nodes_has_room_where_as_many_nodes_have_its_share(
    cluster: FakeRayCluster,
) -> None:
    wide = {"gpus": 4, "engine": {"tp": 2, "pp": 2}}
    findings = await found(cluster, use(fleet(**wide)))
    assert findings["room"][0].says == "smollm2: nodes have what a replica takes"
    assert cluster.probed == [(["a", "b"], {})]
    await cluster.lose_node("a")
    (lacking,) = (await found(cluster, use(fleet(**wide, ray={"nodes": 2}))))["room"]
    assert lacking.verdict == "fail"
    assert lacking.says == "smollm2: no node has CPU 1, GPU 2 on each of 2 nodes"
    assert lacking.hint.startswith("a replica is on 2 nodes, and 1 node has CPU 1, GPU 2: add 1")


async def test_a_replica_whose_ranks_are_left_open_has_a_stage_on_each_node_it_is_told_of(
    cluster: FakeRayCluster,
) -> None:
    findings = await found(cluster, use(fleet(gpus=4, ray={"nodes": 2})))
    assert findings["room"][0].says == "smollm2: nodes have what a replica takes"
    assert cluster.probed == [(["a", "b"], {})]


async def test_each_runtime_environment_of_a_pool_is_tried_once(cluster: FakeRayCluster, tmp_path: Path) -> None:
    pools = {
        "smollm2": {},
        "mine": {"model": str(tmp_path), "ray": {"runtime_env": {"env_vars": {"A": "1"}}}},
        "other": {"model": f"file:{tmp_path / 'absent'}", "ray": {"runtime_env": {"env_vars": {"A": "1"}}}},
    }
    settings = build(FleetSettings, {"driver": "ray", "pools": pools})
    findings = await found(cluster, use(settings))
    assert [env for _, env in cluster.probed] == [{}, {"env_vars": {"A": "1"}}]
    (missing,) = findings["model"]
    assert missing.verdict == "fail"
    assert missing.says == f"{tmp_path / 'absent'} is not on 2 nodes, such as a (a),"
    assert use_of_fleet(build(FleetSettings, {"pools": {"m": {}}}), "") is None
    with pytest.raises(ConfigError, match=r"pools.m.ray.cpu"):
        use_of_fleet(build(FleetSettings, {"driver": "ray", "pools": {"m": {"ray": {"cpu": 1}}}}), "")
    odd = {"engine": {"tp": 1, "pp": 1}, "ray": {"nodes": 2}}
    with pytest.raises(ConfigError, match="cannot be spread over 2 nodes") as refused:
        use_of_fleet(build(FleetSettings, {"driver": "ray", "pools": {"m": odd}}), "")
    assert refused.value.param == "pools.m.ray.nodes"


def test_what_is_wrong_on_nodes_is_told_once_for_all_of_them() -> None:
    nodes = [NodeView(name, f"192.0.2.{number}") for number, name in enumerate("abcd")]

    def looked(*reports: NodeReport) -> dict[str, list[Finding]]:
        by_name: dict[str, list[Finding]] = {}
        told = [replace(one, node=node.id) for node, one in zip(nodes, reports, strict=False)]
        for finding in check_reports(nodes, told, has_store=True):
            by_name.setdefault(finding.name, []).append(finding)
        return by_name

    absent = replace(GOOD, penstock="", problem="ModuleNotFoundError: No module named 'penstock'")
    findings = looked(GOOD, absent, absent, replace(GOOD, has_torch=False))
    assert verdicts(findings["versions"]) == ["fail", "fail", "ok"]
    broken, bare, rest = findings["versions"]
    assert broken.says.startswith("2 nodes, such as 192.0.2.1 (b), cannot import penstock: ModuleNotFound")
    assert f"penstock[engine,ray]=={__version__}" in broken.hint
    assert "192.0.2.3 (d) without torch" in bare.says
    assert rest.says.startswith("2 nodes with penstock")

    (older,) = looked(GOOD, replace(GOOD, penstock="0.0.9"))["versions"]
    assert (older.verdict, older.says) == ("warn", f"node 192.0.2.1 (b) with penstock 0.0.9; this is {__version__}")
    (mixed,) = looked(GOOD, replace(GOOD, python="3.13.0"))["versions"]
    assert mixed.verdict == "warn"
    assert "1 node with" in mixed.says

    (late,) = looked(GOOD, replace(GOOD, skew_s=-30.0), replace(GOOD, skew_s=5.0, skew_error_s=4.0))["clock"]
    assert (late.verdict, late.says) == ("warn", "192.0.2.1 (b) differs by -30 s")

    findings = looked(GOOD, replace(GOOD, store_failure="db:5432: refused"))
    assert verdicts(findings["store"]) == ["warn"]
    assert findings["store"][0].says == "node 192.0.2.1 (b) cannot reach it: db:5432: refused"
    assert looked(GOOD)["store"][0].says == "1 node can reach it"

    findings = looked(NodeReport("", "no runtime_env"))
    assert findings.keys() == {"nodes"}
    assert findings["nodes"][0].says == "192.0.2.0 (a) runs no actor: no runtime_env"


async def test_replicas_of_fleets_without_a_controller_are_told(cluster: FakeRayCluster, tmp_path: Path) -> None:
    for name in ("mine", "gone/far", "stranger"):
        settings = build(FleetSettings, {"name": name, "pools": {"m": {}}})
        pool = settings.pool_settings()["m"]
        spec = ReplicaSpec("r", "m", replica_settings("m", pool, settings.slo))
        await RayDriver(settings, cluster, "hush").start(spec)
    url, now = f"sqlite:///{tmp_path / 'store.db'}", time.time()
    assert fleets_seen(url) == fleets_seen("") == {}
    with open_store(url) as store:
        for name, at in {"mine": now, "gone/far": now - 7200}.items():
            lease = store.fleet.take_lease(name, "holder", None)
            assert lease is not None
            with store.fleet.fenced(name, lease) as execute:
                write_pool(execute, PoolStatus(name, at, fleet=name))
    seen = fleets_seen(url)
    assert seen.keys() == {"mine", "gone/far"}
    gone, mine, stranger = (await found(cluster, RayUse(store=url)))["fleets"]
    assert mine.says == "mine: 1 placement group (1 running), and a controller is at work"
    assert (gone.verdict, gone.says.partition(" for ")[0]) == (
        "warn",
        "gone/far: 1 placement group (1 running), and no controller has been at work",
    )
    assert "takes them over" in gone.hint
    assert stranger.says == "stranger: 1 placement group (1 running), and the store knows no such fleet"
    assert "`name: stranger`" in stranger.hint


def test_placement_groups_are_counted_by_what_they_do() -> None:
    groups = [
        GroupView("penstock/f/a?pool=m"),
        GroupView("penstock/f/b?pool=m", ["node"]),
        GroupView("penstock/f/c?pool=m", ["node"], ActorView(is_begun=True)),
        GroupView("penstock/f/d?pool=m", [], ActorView(is_begun=True, failure="lost")),
    ]
    (finding,) = check_fleets(groups, {"f": 0.0})
    assert finding.says.startswith("f: 4 placement groups (1 failed, 1 not begun, 1 running, 1 waiting for room)")


def test_a_version_of_ray_that_is_too_old_is_told() -> None:
    assert [check_version(one).verdict for one in ("2.9.3", "2.59.1", "2.60.0", "3.0.0.dev0")] == [
        "fail",
        "fail",
        "ok",
        "ok",
    ]


def test_places_of_a_store_that_nodes_may_reach() -> None:
    assert store_places("sqlite:////var/lib/penstock.db") == []
    assert store_places("postgresql://me:p%40ss@db/penstock") == [("db", 5432)]
    assert store_places("postgres://one:6000,[::1]:6001/penstock") == [("one", 6000), ("::1", 6001)]
