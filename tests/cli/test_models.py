"""`penstock models` as a user runs it, over a hub on a local port."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli.main import main
from tests.cli.test_tenants import run
from tests.hub.local_hub import WEIGHTS, local_hub

SPEC = "hf:ada/tiny"


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with local_hub(tmp_path, monkeypatch):
        yield tmp_path / "models"


def listed() -> dict[str, object]:
    found: dict[str, object] = json.loads(run("models", "list", "--json")[0])
    return found


def test_a_model_is_pulled_listed_pinned_verified_and_removed(models: Path) -> None:
    assert "no models yet" in run("models", "list")[1]
    directory = models / "hf" / "ada--tiny"
    assert run("models", "pull", SPEC)[0] == f"{directory}\n"
    run("models", "pin", SPEC)
    table = run("models", "list")[0].splitlines()
    assert table[0].split() == ["MODEL", "SIZE", "STATE", "LAST", "USED", "FETCHED", "SECONDS"]
    assert table[1].startswith(f"{SPEC}  1.3 MB  complete, pinned  20")
    assert table[2].startswith("1.3 MB of ")
    (directory / "model.safetensors").write_bytes(b"?" + WEIGHTS[1:])
    assert run("models", "verify")[1].splitlines()[-1] == f"{SPEC}: fetched again and verified"
    assert (directory / "model.safetensors").read_bytes() == WEIGHTS
    with pytest.raises(SystemExit, match=f"{SPEC} is pinned; `penstock models unpin {SPEC}` first"):
        main(["models", "rm", SPEC])
    run("models", "unpin", SPEC)
    assert run("models", "rm", SPEC)[1] == f"removed {SPEC}, 1.3 MB\n"
    assert listed()["models"] == []


def test_programs_get_json(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_MODELS_LIMIT", "5MB")
    (pulled,) = json.loads(run("models", "pull", SPEC, "--json")[0])
    found = listed()
    assert found["models"] == [pulled]
    assert (found["total_bytes"], found["limit_bytes"]) == (pulled["num_bytes"], 5_000_000)
    assert (pulled["model"], pulled["state"], pulled["path"]) == (SPEC, "complete", str(models / "hf" / "ada--tiny"))
    assert pulled["fetch_s"] > 0
    assert json.loads(run("models", "pin", SPEC, "--json")[0]) == [{"model": SPEC, "pinned": True}]
    (verified,) = json.loads(run("models", "verify", SPEC, "--json")[0])
    assert (verified["model"], verified["damaged"]) == (SPEC, [])


def test_a_limit_that_is_no_size_is_told(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_MODELS_LIMIT", "much")
    with pytest.raises(SystemExit, match="PENSTOCK_MODELS_LIMIT is 'much'; give a size such as 200GB"):
        main(["models", "list"])


@pytest.mark.parametrize("verb", ["pull", "rm", "pin", "verify"])
def test_a_file_of_the_users_is_not_the_caches(models: Path, verb: str) -> None:
    with pytest.raises(SystemExit, match=r"there is no model named '/models/a\.gguf'"):
        main(["models", verb, "/models/a.gguf"])
