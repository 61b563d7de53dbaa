"""`penstock doctor`: what it finds, and that it says so in a line, in JSON and by how it ends."""

from __future__ import annotations

import json
import resource
import socket
import sqlite3
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.capacity.shapes import SHAPES
from penstock.cli.config_file import read_config_file
from penstock.cli.doctor import line
from penstock.cli.main import main
from penstock.cli.store_flags import store_url
from penstock.core.devices import VisibleGpu, VisibleGpus
from penstock.core.settings import EngineSettings, ServerSettings
from penstock.doctor import fleet, machine
from penstock.doctor.checks import look_over
from penstock.doctor.findings import Finding
from penstock.http.tls import ServerTls, expiry
from penstock.tenancy.store import open_store
from tests.certificates import new_ca
from tests.gateway.provider import providing
from tests.gateway.running import running_gateway
from tests.server.replica import serving
from tests.waiting import GIVE_UP_S


def written(path: Path, settings: dict[str, Any]) -> Path:
    path.write_text(json.dumps(settings))
    return path


def found(config: Path, store: Path | None = None) -> dict[str, list[Finding]]:
    by_name: dict[str, list[Finding]] = {}
    url = f"sqlite:///{store}" if store else None
    for finding in look_over(None, partial(read_config_file, config), url, store_url(None, None)):
        by_name.setdefault(finding.name, []).append(finding)
    return by_name


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(fleet, "_TIMEOUT_S", GIVE_UP_S)


def test_a_gateway_with_all_it_needs_has_nothing_to_fix(tmp_path: Path) -> None:
    store = tmp_path / "tenants.db"
    open_store(f"sqlite:///{store}")
    with serving() as replica:
        url = f"http://{replica.host}:{replica.port}"
        findings = found(written(tmp_path / "g.yaml", {"port": 0, "models": {"small": {"replicas": [url]}}}), store)
    assert {one.verdict for name in ("config", "store", "replica") for one in findings[name]} == {"ok"}
    assert "ready, penstock" in findings["replica"][0].says


def test_replicas_with_a_secret_are_asked_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLICA_SECRET", "hush")
    with serving(ServerSettings(gateway_secret="hush")) as replica:
        plain = {"replicas": [f"http://{replica.host}:{replica.port}"], "served_as": "small"}
        models = {"small": plain | {"secret_env": "REPLICA_SECRET"}, "unknown": plain}
        known, unknown = found(written(tmp_path / "g.yaml", {"port": 0, "models": models}))["replica"]
    assert (known.verdict, unknown.verdict) == ("ok", "fail")
    assert "secret" in unknown.says
    assert "models.unknown.secret_env" in unknown.hint


def test_replicas_that_are_gone_wrong_or_of_another_name_are_told(tmp_path: Path) -> None:
    with serving() as replica, providing() as other, providing(models=404) as strange, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{taken.getsockname()[1]}"
        here = f"http://{replica.host}:{replica.port}"
        replicas = [gone, here, other.url, strange.url]
        findings = found(written(tmp_path / "g.yaml", {"port": 0, "models": {"big": {"replicas": replicas}}}))[
            "replica"
        ]
    assert [one.verdict for one in findings] == ["fail", "fail", "ok", "warn"]
    assert "refused" in findings[0].says
    assert "serves small, not big" in findings[1].says
    assert "served_as" in findings[1].hint


def test_a_config_that_is_wrong_is_told_as_a_start_would(tmp_path: Path) -> None:
    for settings, words in (
        ({"modls": {}}, "modls"),
        ({"models": {"m": {"replica": []}}}, "did you mean 'models.m.replicas'"),
        ({"models": {"m": {"replicas": ["http://x"], "key_env": "NO_SUCH_VARIABLE"}}}, "NO_SUCH_VARIABLE"),
    ):
        (finding,) = found(written(tmp_path / "c.yaml", settings))["config"]
        assert finding.verdict == "fail"
        assert words in finding.says


def test_a_store_is_looked_at_and_neither_made_nor_changed(tmp_path: Path) -> None:
    missing = tmp_path / "none.db"
    (finding,) = fleet.store(f"sqlite:///{missing}")
    assert finding.verdict == "ok"
    assert not missing.exists()
    old = tmp_path / "old.db"
    with sqlite3.connect(old) as database:
        database.execute("CREATE TABLE migrations (version INTEGER PRIMARY KEY)")
        database.execute("INSERT INTO migrations VALUES (1)")
    database.close()
    before = old.read_bytes()
    (finding,) = fleet.store(f"sqlite:///{old}")
    assert (finding.verdict, "schema 1 of" in finding.says) == ("warn", True)
    with sqlite3.connect(old) as database:
        assert old.read_bytes() == before
        database.execute("INSERT INTO migrations VALUES (999)")
    database.close()
    assert next(fleet.store(f"sqlite:///{old}")).verdict == "fail"
    (tmp_path / "rubbish.db").write_bytes(b"no database at all" * 100)
    assert next(fleet.store(f"sqlite:///{tmp_path / 'rubbish.db'}")).verdict == "fail"


def test_a_store_whose_tenants_cannot_be_read_is_not_ok(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'tenants.db'}"
    with open_store(url) as store:
        store.add_tenant({"id": "acme"})
        store.create_key("acme")
    assert next(fleet.store(url)).verdict == "ok"
    with sqlite3.connect(tmp_path / "tenants.db") as database:
        database.execute('UPDATE tenants SET document = \'{"id":"acme","priority":"whenever"}\'')
    database.close()
    (finding,) = fleet.store(url)
    assert (finding.verdict, "tenant 'acme' cannot be read" in finding.says) == ("fail", True)
    with sqlite3.connect(tmp_path / "tenants.db") as database:
        database.execute("DROP TABLE tenants")
    database.close()
    (finding,) = fleet.store(url)
    assert (finding.verdict, "no such table: tenants" in finding.says) == ("fail", True)


def test_a_port_that_is_taken_is_told() -> None:
    host = "127.0.0.77"  # where nobody else takes it once it is free
    with socket.socket() as taken:
        taken.bind((host, 0))
        taken.listen()
        number = taken.getsockname()[1]
        (finding,) = fleet.port(host, number, "server.port")
        assert (finding.verdict, "server.port" in finding.hint) == ("warn", True)
    assert next(fleet.port(host, number, "server.port")).verdict == "ok"


def test_too_few_open_files_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = []
    for limit in (256, 4096, 65536):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, 65536))
        verdicts += [one.verdict for one in machine.open_files()]
    assert verdicts == ["fail", "warn", "ok"]


def test_a_disk_that_is_full_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    verdicts = []
    for free_gib in (0.1, 5, 50):
        usage = shutil.disk_usage("/")._replace(free=int(free_gib * 2**30))
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        verdicts += [one.verdict for one in machine.disk()]
    assert verdicts == ["fail", "warn", "ok"]


def test_a_model_whose_files_are_missing_or_not_complete_is_told(tmp_path: Path) -> None:
    engine = EngineSettings()
    assert next(machine.model("smollm2", engine)).verdict == "warn"  # this home has none
    assert next(machine.model("hf:some/model", engine)).verdict == "warn"
    assert next(machine.model("no-such-model", engine)).verdict == "fail"
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (finding,) = machine.model(str(directory), engine)
    assert finding.verdict == "fail"


def test_a_package_that_the_settings_need_and_that_is_not_there_is_told() -> None:
    findings = list(machine.packages({"msgspec": "penstock", "no.such.module": "penstock[x]"}))
    assert [one.verdict for one in findings] == ["ok", "fail"]
    assert "penstock[x]" in findings[1].hint


def test_it_ends_with_one_if_something_must_be_fixed_and_speaks_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(written(tmp_path / "c.yaml", {"modls": {}}))
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--config", config, "--json"])
    assert ended.value.code == 1
    said = json.loads(capsys.readouterr().out)
    assert {"name", "verdict", "says", "hint"} == set(said[0])
    with pytest.raises(SystemExit):
        main(["doctor", "--config", config])
    assert capsys.readouterr().out.splitlines()[-1].endswith("1 to fix")


def test_a_line_has_the_verdict_first_and_what_to_do_last() -> None:
    assert line(Finding("disk", "fail", "0.1 GiB free", "set PENSTOCK_HOME")) == (
        "FAIL  disk         0.1 GiB free: set PENSTOCK_HOME"
    )


def test_certificate_that_ends_soon_is_told_and_https_replicas_are_judged_by_their_ca(tmp_path: Path) -> None:
    ca = new_ca(tmp_path)
    files, strange = ca.issue("gateway", days=30), new_ca(tmp_path, "strange")
    with serving() as replica, running_gateway(replica, tls=ServerTls(str(files.cert), str(files.key))) as behind:
        url = f"https://127.0.0.1:{behind.port}"
        models = {name: {"replicas": [url], "ca_file": str(one.cert)} for name, one in (("a", ca), ("b", strange))}
        settings = {"port": 0, "models": models, "tls_cert": str(files.cert), "tls_key": str(files.key)}
        findings = found(written(tmp_path / "g.yaml", settings))
    assert [one.verdict for one in findings["replica"]] == ["ok", "fail"]
    assert "certificate verify failed" in findings["replica"][1].says
    assert [(one.verdict, one.says) for one in findings["certificate"]] == [("ok", f"{files.cert} is good for 29 days")]
    ends_s = expiry(str(files.cert))
    for days, verdict in ((14.5, "ok"), (13.5, "warn"), (-0.5, "fail")):
        (finding,) = fleet.certificate(str(files.cert), now_s=ends_s - days * 86400)
        assert finding.verdict == verdict
        assert verdict == "ok" or finding.hint.startswith("renew it")


def test_certificate_that_cannot_be_used_is_told_as_a_start_would(tmp_path: Path) -> None:
    ca, other = new_ca(tmp_path), new_ca(tmp_path, "other")
    settings = {"models": {"m": {"replicas": ["http://x"]}}, "tls_cert": str(ca.cert), "tls_key": str(other.key)}
    (finding,) = found(written(tmp_path / "c.yaml", settings))["config"]
    assert finding.verdict == "fail"
    assert "KEY_VALUES_MISMATCH" in finding.says


def gpus(count: int, joined: int | None) -> VisibleGpus:
    return VisibleGpus((VisibleGpu("NVIDIA H100 80GB HBM3", 79 << 30, 78 << 30),) * count, joined)


def test_parallelism_is_told_as_a_start_would_choose_it() -> None:
    (one,) = machine.parallelism(SHAPES["llama8b"], EngineSettings(), gpus(8, 8))
    assert (one.verdict, one.name) == ("ok", "parallelism")
    assert one.says.startswith("one GPU is enough: 15.0 GiB of weights, then room for ")
    (four,) = machine.parallelism(SHAPES["llama70b"], EngineSettings(), gpus(8, 8))
    assert four.says.startswith("tensor parallel 4: 32.9 GiB of weights")
    assert "communication over NVLink" in four.says
    assert "not fewer: TP1: 131 GiB" in four.says
    (none,) = machine.parallelism(SHAPES["llama405b"], EngineSettings(), gpus(8, 8))
    assert (none.verdict, "does not fit on the 8 GPUs here" in none.says) == ("fail", True)
    (wide,) = machine.parallelism(SHAPES["llama405b"], EngineSettings(nnodes=2), gpus(8, 8))
    assert wide.says.startswith("tensor parallel 8, pipeline parallel 2: 47.3 GiB of weights")
    assert "communication over NVLink and the network" in wide.says
    (odd,) = machine.parallelism(SHAPES["llama8b"], EngineSettings(tp=3), gpus(8, 8))
    assert (odd.verdict, "intermediate size of 14,336" in odd.says) == ("fail", True)


@pytest.mark.parametrize(
    ("joined", "said"),
    [
        (4, "all 4 GPUs are joined by NVLink"),
        (2, "the first 2 GPUs are joined by NVLink, the others of 4 by PCIe"),
        (1, "no GPU is joined to the next by NVLink"),
        (None, "is not known here"),
    ],
)
def test_what_joins_several_gpus_is_told(joined: int | None, said: str) -> None:
    (found,) = machine.links(gpus(4, joined))
    assert said in found.says
