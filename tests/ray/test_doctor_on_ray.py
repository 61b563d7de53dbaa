"""`penstock doctor` as an operator runs it, on a real Ray cluster."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import __version__
from penstock.cli.main import main
from penstock.fleet.drivers.ray_cluster import EngineOrder
from tests.cli.real_server import write_tiny_model
from tests.ray.contract import until
from tests.ray.real_cluster import RealRay, RealStage, real_ray
from tests.waiting import GIVE_UP_S

pytestmark = [pytest.mark.slow, pytest.mark.drill]


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRay]:
    """A cluster with one node in each of two zones."""
    with real_ray(tmp_path_factory.mktemp("ray")) as found:
        for zone in ("a", "b"):
            found.add_node({"CPU": 2, "GPU": 2, f"zone:{zone}": 1000})
        yield found


@pytest.fixture
async def stage(ray: RealRay, tmp_path: Path) -> AsyncIterator[RealStage]:
    found = RealStage(ray, tmp_path / "ray.log")
    yield found
    await found.close()


class Doctor:
    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._directory = directory
        self._capsys = capsys

    def looks(self, *flags: str) -> dict[str, list[dict[str, str]]]:
        """Findings by name."""
        code = 0
        try:
            main(["doctor", "--json", *flags])
        except SystemExit as ended:
            code = int(ended.code or 0)
        by_name: dict[str, list[dict[str, str]]] = {}
        for finding in json.loads(self._capsys.readouterr().out):
            by_name.setdefault(finding["name"], []).append(finding)
        has_failed = any(one["verdict"] == "fail" for every in by_name.values() for one in every)
        assert code == has_failed
        return by_name

    def looks_at_fleet(
        self, address: str, *flags: str, store: str = "", **pool: Any
    ) -> dict[str, list[dict[str, str]]]:
        """The address is given beside the file, as for `penstock fleet`."""
        config = self._directory / "fleet.yaml"
        url = store or f"sqlite:///{self._directory / 'store.db'}"
        config.write_text(json.dumps({"driver": "ray", "store": url, "pools": {"tiny": pool}}))
        return self.looks("--config", str(config), "--address", address)


@pytest.fixture
def doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Doctor:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    return Doctor(tmp_path, capsys)


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "tiny"
    path.mkdir()
    write_tiny_model(path)
    return str(path)


def test_a_cluster_that_has_all_a_fleet_needs_has_nothing_to_fix(ray: RealRay, doctor: Doctor, model: str) -> None:
    findings = doctor.looks_at_fleet(ray.address, model=model, zones=["a", "b"], gpus=1)
    ours = findings.keys() - {"python", "open files", "disk"}
    assert ours == {"config", "store", "ray", "nodes", "zones", "gpus", "room", "versions", "clock"}
    assert {one["verdict"] for name in ours for one in findings[name]} == {"ok"}, findings
    assert findings["nodes"][0]["says"] == "3 nodes alive"
    assert findings["versions"][0]["says"].startswith(f"2 nodes with penstock {__version__}, Ray 2.")
    assert {one["verdict"] for one in doctor.looks("--ray", "--address", ray.address)["ray"]} == {"ok"}


def test_what_a_pool_lacks_is_told_with_what_to_do(ray: RealRay, doctor: Doctor, tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens there
        store = f"postgresql://127.0.0.1:{taken.getsockname()[1]}/penstock"
        findings = doctor.looks_at_fleet(ray.address, store=store, model=absent, zones=["a", "c"], gpus=2)
    assert [one["verdict"] for one in findings["room"]] == ["ok", "warn"]
    assert "no node has the resource zone:c" in findings["room"][1]["hint"]
    assert findings["model"][0]["says"].startswith(f"{absent} is not on node 127.0.0.1")
    assert [one["verdict"] for one in findings["store"]] == ["fail", "warn"]
    assert "cannot reach it: 127.0.0.1:" in findings["store"][1]["says"]
    (lacking,) = doctor.looks_at_fleet(ray.address, gpus=4)["room"]
    assert lacking["verdict"] == "fail"
    assert "none has more than 2 GPUs: `gpus: 2` would fit" in lacking["hint"]


def test_another_penstock_on_nodes_is_told(ray: RealRay, doctor: Doctor, tmp_path: Path) -> None:
    """Nodes of this cluster have this checkout, but by a runtime environment something else comes first."""

    def looked(source: str) -> dict[str, str]:
        package = tmp_path / f"other-{len(source)}" / "penstock"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(source)
        env = {"env_vars": {"PYTHONPATH": str(package.parent)}}
        (found,) = doctor.looks_at_fleet(ray.address, ray={"runtime_env": env})["versions"]
        return found

    broken = looked("raise ImportError('no compiled part')")
    assert broken["verdict"] == "fail"
    assert "2 nodes, such as 127.0.0.1" in broken["says"]
    assert "cannot import penstock: ImportError: no compiled part" in broken["says"]
    own = Path(__file__).parents[2] / "src" / "penstock"
    older = looked(f"__version__ = '0.0.9'\n__path__.append({str(own)!r})\n")
    assert older["verdict"] == "warn"
    assert f"with penstock 0.0.9; this is {__version__}" in older["says"]


async def test_nodes_that_are_lost_or_drain_are_told(
    ray: RealRay, stage: RealStage, doctor: Doctor, model: str
) -> None:
    name, bundle = "penstock/leaving/r-1?pool=tiny", {"CPU": 1.0, "leaving": 0.001}
    leaving = await stage.add_node({"CPU": 1, "leaving": 1})
    lost = await stage.add_node({"CPU": 1})
    assert await stage.create_group(name, [bundle], GIVE_UP_S)
    config = json.dumps({"model": model, "engine": {"load": "dummy", "dtype": "float32", "threads": 1}})
    await stage.start_engine(name, [bundle], EngineOrder(config, "secret"))  # an idle node would be gone at once
    await stage.drain_node(leaving, time.time() + 1000)
    await stage.lose_node(lost)
    await until(stage.nodes, lambda nodes: [one.id for one in nodes if not one.is_alive] == [lost])
    findings = await _in_thread(doctor, "--ray", "--address", ray.address)
    said = [one["says"] for one in findings["nodes"] if one["verdict"] == "warn"]
    assert any(f"({lost[:8]}) ended without notice: " in one for one in said), said
    assert any(f"({leaving[:8]}) is draining and goes in " in one for one in said), said
    assert "leaving: 1 placement group (1 running)" in findings["fleets"][0]["says"]
    await stage.remove_group(name)


async def test_replicas_that_nobody_looks_after_are_told(ray: RealRay, stage: RealStage, doctor: Doctor) -> None:
    name = "penstock/forgotten/r-1?pool=tiny"
    assert await stage.create_group(name, [{"CPU": 1.0}], GIVE_UP_S)
    (finding,) = (await _in_thread(doctor, "--ray", "--address", ray.address))["fleets"]
    assert finding["verdict"] == "warn"
    assert finding["says"] == "forgotten: 1 placement group (1 not begun), and the store knows no such fleet"
    await stage.remove_group(name)
    assert "fleets" not in await _in_thread(doctor, "--ray", "--address", ray.address)


def test_an_address_where_nothing_listens_is_one_line(ray: RealRay, doctor: Doctor) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        findings = doctor.looks("--ray", "--address", address)
    assert [one["verdict"] for one in findings["ray"]] == ["ok", "fail"]
    assert findings["ray"][1]["says"] == f"{address} cannot be reached: Connection refused"
    assert "nodes" not in findings
    (_, client) = doctor.looks("--ray", "--address", f"ray://{address}")["ray"]
    assert "is of Ray Client" in client["says"]


async def _in_thread(doctor: Doctor, *flags: str) -> dict[str, list[dict[str, str]]]:
    """The command has an event loop of its own."""
    return await asyncio.to_thread(doctor.looks, *flags)
