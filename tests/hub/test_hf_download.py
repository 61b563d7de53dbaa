from __future__ import annotations

import hashlib
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.core.errors import ModelCorrupt, ModelMissing, ModelUnsupported
from penstock.hub.progress import silent
from penstock.hub.sources import cached, pull
from tests.hub.local_hub import REVISION, WEIGHTS, LocalHub

SPEC = "hf:ada/tiny"


def get() -> Path:
    return pull(SPEC, progress=silent)


def names(directory: Path) -> set[str]:
    return {file.name for file in directory.iterdir() if not file.name.startswith(".")}


def test_what_a_server_needs_is_downloaded_and_nothing_else(hub: LocalHub, tmp_path: Path) -> None:
    directory = get()
    assert directory == tmp_path / "models" / "hf" / "ada--tiny"
    assert names(directory) == {"config.json", "model.safetensors", "tokenizer.json"}
    assert (directory / "model.safetensors").read_bytes() == WEIGHTS


def test_how_an_encoder_pools_is_downloaded_too(hub: LocalHub) -> None:
    hub.files["1_Pooling/config.json"] = b'{"pooling_mode_cls_token": true}'
    assert (get() / "1_Pooling" / "config.json").read_bytes() == hub.files["1_Pooling/config.json"]


def test_a_complete_model_needs_no_network(hub: LocalHub) -> None:
    directory = get()
    hub.close()
    assert get() == directory


def test_a_connection_that_is_cut_off_is_resumed(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 100_000)
    hub.cut_after = 700_000
    assert (get() / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.fetches("model.safetensors") == [None, "bytes=700000-"]


def test_a_later_run_goes_on_with_the_files_that_are_missing(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    hub.cut_after = 0
    with pytest.raises(ModelMissing, match=r"could not download.*run the same again"):
        get()
    assert cached(SPEC) is None
    hub.cut_after = None
    assert (get() / "model.safetensors").read_bytes() == WEIGHTS
    assert len(hub.fetches("tokenizer.json")) == 1
    assert sum(path == "/api/models/ada/tiny" for _, path, _, _ in hub.requests) == 1


def test_a_file_that_arrives_damaged_is_fetched_again(hub: LocalHub) -> None:
    hub.damaged = {"model.safetensors": 1, "config.json": 1}
    said: list[str] = []
    directory = pull(SPEC, progress=lambda what, done, total: said.append(what))
    assert (directory / "model.safetensors").read_bytes() == WEIGHTS
    assert (directory / "config.json").read_bytes() == b"{}"
    assert "config.json, model.safetensors arrived damaged; fetching again" in said
    assert len(hub.fetches("tokenizer.json")) == 1


def test_a_file_that_never_arrives_right_is_named_and_never_served(hub: LocalHub, tmp_path: Path) -> None:
    hub.damaged = {"model.safetensors": 99}
    with pytest.raises(ModelCorrupt, match=r"model\.safetensors of hf:ada/tiny arrived damaged 2 times"):
        get()
    assert cached(SPEC) is None
    assert not list(tmp_path.rglob("model.safetensors"))


def test_a_model_of_a_version_without_records_is_not_downloaded_again(hub: LocalHub, tmp_path: Path) -> None:
    directory = tmp_path / "models" / "hf" / "ada--tiny"
    directory.mkdir(parents=True)
    siblings = [
        {"rfilename": name, "size": len(content), "lfs": {"sha256": hashlib.sha256(content).hexdigest()}}
        for name, content in hub.files.items()
    ]
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (directory / name).write_bytes(hub.files[name])
    assert get() == directory
    (directory / ".listing.json").write_text(json.dumps({"sha": REVISION, "siblings": siblings}))
    assert get() == directory
    assert hub.requests == []


def test_the_half_model_of_a_version_without_records_is_completed(hub: LocalHub, tmp_path: Path) -> None:
    directory = tmp_path / "models" / "hf" / "ada--tiny"
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(WEIGHTS)
    assert names(get()) == {"config.json", "model.safetensors", "tokenizer.json"}
    assert hub.fetches("model.safetensors") == []


def test_what_the_hubs_own_cache_has_is_copied(hub: LocalHub) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download("ada/tiny", revision=REVISION, endpoint=hub.url)
    hub.requests.clear()
    assert (get() / "model.safetensors").read_bytes() == WEIGHTS
    assert not hub.fetches("model.safetensors")


def test_the_token_is_sent(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    get()
    sent = {authorization for _, path, _, authorization in hub.requests if "ada/tiny" in path}
    assert sent == {"Bearer secret"}


@pytest.mark.parametrize(
    ("status", "advice"), [(404, "check its name"), (401, "HF_TOKEN"), (403, "HF_TOKEN"), (503, "later")]
)
def test_a_refusal_says_what_to_do_and_leaves_nothing(hub: LocalHub, tmp_path: Path, status: int, advice: str) -> None:
    hub.status = status
    with pytest.raises(ModelMissing, match=advice):
        get()
    assert not [path for path in (tmp_path / "models").rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_without_a_network_it_says_so(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelMissing, match="check the network"):
        get()


def test_offline_nobody_is_asked(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelMissing, match="HF_HUB_OFFLINE"):
        get()
    assert hub.requests == []


def test_a_repository_without_safetensors_is_refused(hub: LocalHub) -> None:
    del hub.files["model.safetensors"]
    with pytest.raises(ModelUnsupported, match="safetensors"):
        get()


def test_something_else_than_a_hub_is_noticed(hub: LocalHub) -> None:
    hub.is_html = True
    with pytest.raises(ModelMissing, match="HF_ENDPOINT"):
        get()


def test_a_disk_that_fills_up_is_not_the_network(hub: LocalHub, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "models", "pull", SPEC],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000)),
    )
    assert ended.returncode != 0
    assert ended.stderr.splitlines()[-1].endswith(
        f"cannot store {SPEC}: {tmp_path}/models: File too large; free some space or set PENSTOCK_HOME elsewhere"
    )
    assert cached(SPEC) is None
    assert (get() / "model.safetensors").read_bytes() == WEIGHTS


def test_a_model_larger_than_what_is_free_is_not_begun(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000, total=10**9))
    with pytest.raises(ModelMissing, match=r"1\.3 MB are needed and 1\.0 MB are free; free some space or set"):
        get()
    assert not hub.fetches("model.safetensors")


def test_a_home_that_cannot_be_written_is_told(hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(ModelMissing, match=f"cannot store {SPEC}: .*file"):
        get()
