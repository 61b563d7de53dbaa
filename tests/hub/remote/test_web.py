"""Models of a web server."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from penstock.core.errors import ModelCorrupt, ModelMissing, ModelUnsupported
from penstock.hub.progress import silent
from penstock.hub.remote.web import WebSource
from penstock.hub.resolve import default_name
from penstock.hub.sources import cached, source_of, weights_cache
from tests.hub.remote.local_web import LocalWeb, contents

WEIGHTS = os.urandom(20_000)
PARTS = ["bytes=0-4095", "bytes=4096-8191", "bytes=8192-12287", "bytes=12288-16383", "bytes=16384-19999"]


def pulled(spec: str, pauses: list[float] | None = None) -> Path:
    source = WebSource(spec, pause=(pauses if pauses is not None else []).append)
    return weights_cache().ensure(source, silent)


def read_config(spec: str) -> None:
    WebSource(spec).read_config()


def test_a_file_is_fetched_in_parts(web: LocalWeb) -> None:
    web.files["/a/tiny.gguf"] = WEIGHTS
    spec = f"{web.url}/a/tiny.gguf"
    path = pulled(spec)
    assert path.read_bytes() == WEIGHTS
    assert path.name == "tiny.gguf"
    assert Counter(web.ranges("/a/tiny.gguf")) == Counter(PARTS)
    assert {file.name for file in path.parent.iterdir()} == {"tiny.gguf", ".penstock.json"}
    web.close()
    assert pulled(spec) == path, "what is there needs no network"
    assert default_name(spec) == "tiny"
    (model,) = weights_cache().models()
    assert (model.model, model.state, model.num_bytes > len(WEIGHTS)) == (spec, "complete", True)


def test_a_directory_is_fetched_with_what_a_model_needs(web: LocalWeb) -> None:
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
    files = {
        "config.json": b'{"model_type": "llama"}',
        "model.safetensors.index.json": index,
        "model-1.safetensors": WEIGHTS,
        "model-2.safetensors": WEIGHTS[::-1],
        "tokenizer.json": b"{}",
        "1_Pooling/config.json": b"{}",
    }
    web.files = {f"/m/{name}": content for name, content in files.items()} | {"/m/README.md": b"not wanted"}
    directory = pulled(f"{web.url}/m/")
    assert contents(directory) == files
    assert WebSource(f"{web.url}/m").read_config() == {"model_type": "llama"}
    assert default_name(f"{web.url}/m/") == "m"


def test_a_directory_with_one_file_of_weights(web: LocalWeb) -> None:
    web.files = {"/m/config.json": b"{}", "/m/model.safetensors": WEIGHTS}
    assert (pulled(f"{web.url}/m") / "model.safetensors").read_bytes() == WEIGHTS


def test_a_part_that_is_cut_off_goes_on_where_it_was(web: LocalWeb) -> None:
    web.files["/tiny.gguf"] = WEIGHTS[:4096]
    web.cuts = [1000, 0, 5]
    pauses: list[float] = []
    assert pulled(f"{web.url}/tiny.gguf", pauses).read_bytes() == WEIGHTS[:4096]
    assert web.ranges("/tiny.gguf") == ["bytes=0-4095", "bytes=1000-4095", "bytes=1000-4095", "bytes=1005-4095"]
    assert pauses == [0.5, 1.0, 0.5], "longer while nothing comes"


def test_a_busy_server_is_asked_again_when_it_says(web: LocalWeb) -> None:
    web.files["/tiny.gguf"] = WEIGHTS[:4096]
    web.statuses = [503, 429]
    pauses: list[float] = []
    pulled(f"{web.url}/tiny.gguf", pauses)
    assert pauses == [7.0, 7.0]


def test_a_server_that_stays_busy_is_told_and_parts_are_kept(web: LocalWeb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.hub.remote.parts.CONNECTIONS", 1)
    web.files["/tiny.gguf"] = WEIGHTS
    web.statuses = [200, 200] + [503] * 100
    spec = f"{web.url}/tiny.gguf"
    with pytest.raises(ModelMissing, match="the server answers 503; check the network and run the same again"):
        pulled(spec)
    assert cached(spec) is None
    (model,) = weights_cache().models()
    assert (model.model, model.state) == (spec, "partial")
    web.statuses.clear()
    there = len(web.requests)
    assert pulled(spec).read_bytes() == WEIGHTS
    asked = [range for _, range in web.requests[there:] if range != "bytes=0-0"]
    assert len(asked) == 3, "two parts were there"


def test_parts_of_another_version_are_not_mixed_in(web: LocalWeb) -> None:
    web.files["/tiny.gguf"] = WEIGHTS
    web.statuses = [200, 200] + [503] * 100
    with pytest.raises(ModelMissing):
        pulled(f"{web.url}/tiny.gguf")
    web.statuses.clear()
    web.files["/tiny.gguf"] = other = WEIGHTS[::-1]
    assert pulled(f"{web.url}/tiny.gguf").read_bytes() == other


def test_a_file_that_changes_meanwhile_is_told(web: LocalWeb) -> None:
    web.files["/tiny.gguf"] = WEIGHTS[:4096]
    web.cuts = [1000]

    def change(pause_s: float) -> None:
        web.files["/tiny.gguf"] = WEIGHTS[4096:8192]

    with pytest.raises(ModelMissing, match=r"tiny\.gguf is not what it was when the download began"):
        weights_cache().ensure(WebSource(f"{web.url}/tiny.gguf", pause=change), silent)
    assert pulled(f"{web.url}/tiny.gguf").read_bytes() == WEIGHTS[4096:8192]


def test_a_server_without_ranges_sends_whole_files(web: LocalWeb) -> None:
    web.files["/tiny.gguf"] = WEIGHTS
    web.takes_ranges = False
    web.cuts = [10_000]
    assert pulled(f"{web.url}/tiny.gguf").read_bytes() == WEIGHTS
    assert web.ranges("/tiny.gguf") == [None, None]


def test_a_server_without_versions_works(web: LocalWeb) -> None:
    web.files["/tiny.gguf"] = WEIGHTS
    web.tells_versions = False
    assert pulled(f"{web.url}/tiny.gguf").read_bytes() == WEIGHTS


def test_an_empty_file_of_a_model_is_one(web: LocalWeb) -> None:
    web.files = {"/m/config.json": b"{}", "/m/model.safetensors": WEIGHTS, "/m/chat_template.jinja": b""}
    assert (pulled(f"{web.url}/m") / "chat_template.jinja").read_bytes() == b""


def test_a_hash_is_checked(web: LocalWeb) -> None:
    web.files["/tiny.gguf"] = WEIGHTS
    right = hashlib.sha256(WEIGHTS).hexdigest()
    assert pulled(f"{web.url}/tiny.gguf#sha256={right}").read_bytes() == WEIGHTS
    with pytest.raises(ModelCorrupt, match="arrived damaged 2 times"):
        pulled(f"{web.url}/tiny.gguf#sha256={'0' * 64}")


def test_damage_is_found_by_the_hash_of_what_arrived(web: LocalWeb) -> None:
    web.files["/tiny.gguf"] = WEIGHTS
    spec = f"{web.url}/tiny.gguf"
    path = pulled(spec)
    path.write_bytes(b"?" + WEIGHTS[1:])
    source = source_of(spec)
    assert source is not None
    assert weights_cache().verify(source) == ["tiny.gguf"]
    assert pulled(spec).read_bytes() == WEIGHTS


def test_a_password_comes_from_netrc(web: LocalWeb, tmp_path: Path) -> None:
    web.files["/tiny.gguf"] = WEIGHTS
    web.authorization = "Basic YWRhOnNlY3JldA=="
    with pytest.raises(ModelMissing, match=r"\.netrc"):
        pulled(f"{web.url}/tiny.gguf")
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login ada password secret\n")
    assert pulled(f"{web.url}/tiny.gguf").read_bytes() == WEIGHTS


def test_redirects_are_followed(web: LocalWeb) -> None:
    web.files["/there.bin"] = WEIGHTS
    web.moved["/tiny.gguf"] = "/there.bin?signed=1"
    assert pulled(f"{web.url}/tiny.gguf").read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("/none.gguf", "/none.gguf is not there, or not for us: the server answers 404"),
        ("/none", "has no config.json: give the URL of a .gguf file, or of a directory"),
        ("/m", "has neither model.safetensors.index.json nor model.safetensors"),
        ("/evil", "names no safetensors files beside it"),
        ("/text", "config.json at .* is not a JSON object"),
        ("/m/config.json#sha256=00", "after '#' of .* only a .gguf file's sha256=HEX is understood"),
    ],
)
def test_what_is_no_model_is_told_and_leaves_nothing(web: LocalWeb, tmp_path: Path, spec: str, says: str) -> None:
    evil = json.dumps({"weight_map": {"a": "../../model.safetensors"}}).encode()
    web.files = {
        "/m/config.json": b"{}",
        "/evil/config.json": b"{}",
        "/evil/model.safetensors.index.json": evil,
        "/text/config.json": b"hello",
    }
    with pytest.raises((ModelMissing, ModelUnsupported), match=says):
        (pulled if spec != "/text" else read_config)(f"{web.url}{spec}")
    assert not [path for path in (tmp_path / "models").rglob("*") if path.is_file() and path.suffix != ".lock"]


@pytest.mark.parametrize("spec", ["https://ada:secret@example.org/a.gguf", "https:///a.gguf"])
def test_addresses_that_are_none_are_refused_without_their_secrets(spec: str) -> None:
    with pytest.raises(ModelMissing) as caught:
        source_of(spec)
    assert "secret" not in str(caught.value)


def test_secrets_of_a_query_are_not_told(web: LocalWeb) -> None:
    with pytest.raises(ModelMissing) as caught:
        pulled(f"{web.url}/none.gguf?signature=secret")
    assert "secret" not in str(caught.value)


def test_nobody_there_is_told() -> None:
    with pytest.raises(ModelMissing, match=r"could not download http://127\.0\.0\.1:9/tiny\.gguf.*check the network"):
        pulled("http://127.0.0.1:9/tiny.gguf")


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_its_parts(web: LocalWeb, tmp_path: Path) -> None:
    web.files["/tiny.gguf"] = WEIGHTS
    web.stalls_after = 3
    spec = f"{web.url}/tiny.gguf"
    program = (
        "import sys, penstock.hub.remote.parts as parts\nparts.PART_BYTES, parts.CONNECTIONS = 4096, 1\n"
        "from penstock.hub.sources import pull\npull(sys.argv[1], progress=lambda *_: None)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, spec])
    try:
        assert web.is_stalled.wait(60)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert cached(spec) is None
    web.stalls_after = None
    there = len(web.requests)
    assert pulled(spec).read_bytes() == WEIGHTS
    assert {range for _, range in web.requests[there:]} == {"bytes=0-0", *PARTS[3:]}
