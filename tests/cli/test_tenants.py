"""The commands about tenants as a user runs them."""

import io
import json
import re
import stat
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.tenancy.store import open_store
from penstock.tenancy.usage import Usage
from tests.cli.test_main import penstock

KEY = re.compile(r"psk_[0-9A-Za-z]{10}_[0-9A-Za-z]{32}\n")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    monkeypatch.delenv("PENSTOCK_STORE", raising=False)
    return tmp_path


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> float:
    """The time of day for whoever asks: a noon, so that no midnight comes between."""
    noon_s = 20_833 * 86_400 + 43_200.0
    monkeypatch.setattr(time, "time", lambda: noon_s)
    return noon_s


def run(*words: str) -> tuple[str, str]:
    """What the command writes to standard output and to standard error, in this process."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        main([*words])
    return out.getvalue(), err.getvalue()


def answer(*words: str) -> str:
    return run(*words)[0]


def complaint(*words: str) -> str:
    with redirect_stderr(io.StringIO()) as err, pytest.raises(SystemExit) as ended:
        main([*words])
    return f"{ended.value.code}\n{err.getvalue()}"


def test_a_tenants_life(home: Path) -> None:
    answer(
        "tenants",
        "add",
        "acme",
        "--requests-per-minute",
        "60",
        "--tokens-per-minute",
        "20000",
        "--concurrency",
        "8",
        "--max-input",
        "4096",
        "--max-output",
        "512",
        "--models",
        "smollm2",
        "--priority",
        "interactive",
    )
    assert stat.S_IMODE((home / "penstock.db").stat().st_mode) == 0o600
    added = json.loads(answer("tenants", "show", "acme", "--json"))
    assert added["limits"] == {
        "requests_per_minute": 60,
        "tokens_per_minute": 20000,
        "smooth": False,
        "concurrency": 8,
        "max_input": 4096,
        "max_output": 512,
    }
    assert (added["models"], added["adapters"], added["priority"]) == (["smollm2"], [], "interactive")

    answer(
        "tenants", "set", "acme", "--max-input", "none", "--models", "a, b-*", "--no-active", "--tokens-per-day", "9"
    )
    answer("tenants", "set", "acme", "--route-headers", "--smooth")
    changed = json.loads(answer("tenants", "list", "--json"))[0]
    assert changed["limits"] == {**added["limits"], "max_input": None, "smooth": True}
    assert (changed["models"], changed["is_active"], changed["budget"]["tokens_per_day"]) == (["a", "b-*"], False, 9)
    assert changed["route_headers"] is True
    assert re.search(r"^acme +interactive +60 +20,000 +8 +a, b-\* +no$", answer("tenants", "list"), re.MULTILINE)
    assert re.search(r"^tokens per minute +20,000\nsmooth +yes$", answer("tenants", "show", "acme"), re.MULTILINE)

    answer("tenants", "remove", "acme")
    assert answer("tenants", "list") == ""


def test_a_new_key_is_alone_on_standard_output_and_nowhere_else(home: Path) -> None:
    answer("tenants", "add", "acme")
    created = penstock("keys", "create", "acme", "--name", "laptop")
    assert KEY.fullmatch(created.stdout)
    assert "cannot be shown again" in created.stderr
    secret = created.stdout.strip().rpartition("_")[2]
    shown = answer("keys", "list") + answer("keys", "list", "acme", "--json") + created.stderr
    assert secret not in shown
    assert re.search(r"^psk_\w{10} +acme +laptop .* active$", shown, re.MULTILINE)
    assert all(secret.encode() not in file.read_bytes() for file in home.iterdir())


def test_keys_are_rotated_and_revoked_by_id(home: Path) -> None:
    answer("tenants", "add", "acme")
    first = answer("keys", "create", "acme").strip()
    began_s = time.time()
    rotated, note = run("keys", "rotate", first[:14], "--grace", "24h")
    ended_s = time.time()
    assert KEY.fullmatch(rotated)
    assert f"{first[:14]} works until" in note
    second = rotated.strip()
    answer("keys", "revoke", second[4:14])
    states = {key["id"]: key for key in json.loads(answer("keys", "list", "--json"))}
    assert began_s <= states[first[4:14]]["expires_at"] - 24 * 3600 <= ended_s
    assert states[second[4:14]]["revoked_at"] is not None
    assert "has ended already" in complaint("keys", "rotate", second[:14])


def test_the_usage_of_all_is_shown_where_no_tenant_is_named(home: Path, now_s: float) -> None:
    assert answer("usage").startswith("nothing was used in 20")
    assert "no gateway has declared a model with versions" in answer("routes", "list")
    used = [
        Usage(str(number), tenant, "", "smollm2", now_s, 1000, 0, 234, cost, device_us=cost // 200)
        for number, (tenant, cost) in enumerate([("zeta", 0), ("anonymous", 0), ("acme", 5 * 10**8), ("acme", 0)])
    ]
    with open_store(f"sqlite:///{home / 'penstock.db'}") as store:
        store.usage.append(used, now_s=now_s)
    head, *rows = answer("usage").splitlines()
    assert re.fullmatch(r"TENANT +TOKENS TODAY +DEVICE S +COST +TOKENS IN \d{4}-\d\d +DEVICE S +COST", head)
    assert [row.split() for row in rows] == [
        ["acme", "2,468", "2.500", "0.5000", "2,468", "2.500", "0.5000"],
        ["anonymous", "1,234", "-", "-", "1,234", "-", "-"],
        ["zeta", "1,234", "-", "-", "1,234", "-", "-"],
    ]
    first, *_ = json.loads(answer("usage", "--json"))
    spent = {"tokens": 2468, "device_s": 2.5, "cost": 0.5}
    assert first == {"tenant": "acme", "today": spent, "month": spent}


def test_usage_is_summed_for_people_and_for_programs(home: Path, now_s: float) -> None:
    answer("tenants", "add", "acme")
    with open_store(f"sqlite:///{home}/penstock.db") as store:
        batch = [Usage(f"r{i}", "acme", "k", "smollm2", now_s, 1000, 10, 20, 1_500_000, 1, 2500, 40) for i in range(3)]
        old = Usage("old", "acme", "k", "smollm2", now_s - 40 * 86400, 1, 0, 1)
        store.usage.append([*batch, old], now_s=now_s)
    text = answer("usage", "acme")
    assert re.search(r"^\d{4}-\d\d-\d\d +smollm2 +3 +3,000 +30 +60 +0\.007 +0\.0045$", text, re.MULTILINE)
    assert re.search(r"^total +3 +3,000 +30 +60 +0\.007 +0\.0045$", text, re.MULTILINE)
    told = json.loads(answer("usage", "acme", "--since", "60d", "--by", "all", "--json"))
    counts = {
        "requests": 4,
        "input_tokens": 3001,
        "cached_tokens": 30,
        "output_tokens": 61,
        "device_s": 0.0075,
        "kv_block_s": 0.12,
        "cost": 0.0045,
    }
    assert told["usage"] == [{"model": "smollm2", **counts}]
    assert told["total"] == counts


def test_the_store_is_the_flags_or_the_configs_or_the_environments(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = {name: f"sqlite:///{tmp_path}/{name}.db" for name in ("flag", "config", "environment")}
    config = tmp_path / "penstock.yaml"
    config.write_text(f"store: {urls['config']}\n")
    monkeypatch.setenv("PENSTOCK_STORE", urls["environment"])
    answer("tenants", "add", "by-environment")
    answer("tenants", "add", "by-config", "--config", str(config))
    answer("tenants", "add", "by-flag", "--config", str(config), "--store", urls["flag"])
    for name, url in urls.items():
        with open_store(url) as store:
            assert [tenant.id for tenant in store.tenants()] == [f"by-{name}"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tenants", "add", "Not An Id"], "id"),
        (["tenants", "add", "acme", "--concurrency", "0"], "concurrency"),
        (["tenants", "add", "acme", "--concurrency", "many"], "invalid int value"),
        (["tenants", "add", "acme", "--priority", "urgent"], "unknown choice"),
        (["tenants", "show", "nobody"], "there is no tenant 'nobody'"),
        (["keys", "create", "nobody"], "there is no tenant 'nobody'"),
        (["keys", "revoke", "what"], "no key id"),
        (["keys", "revoke", "psk_0123456789"], "there is no key psk_0123456789"),
        (["usage", "nobody"], "there is no tenant 'nobody'"),
        (["usage", "--since", "7d"], "are for the usage of one TENANT"),
        (["usage", "acme", "--since", "yesterday"], "neither a date"),
        (["tenants", "list", "--store", "redis://x"], "sqlite:///path or postgresql://"),
    ],
)
def test_what_is_wrong_is_one_clear_line(home: Path, words: list[str], expected: str) -> None:
    assert expected in complaint(*words)
