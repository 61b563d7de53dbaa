from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.core.errors import ModelMissing, ModelUnsupported
from penstock.hub.hf_download import download_hf
from penstock.hub.progress import silent

WEIGHTS = bytes(range(256)) * 5_000


class Hub:
    """A small Hugging Face Hub on a local port. `cut_after` ends every reply about a file after so many bytes."""

    def __init__(self) -> None:
        self.files = {
            "config.json": b"{}",
            "model.safetensors": WEIGHTS,
            "tokenizer.json": b"{}",
            "README.md": b"not wanted",
            "onnx/model.safetensors": b"not wanted",
        }
        self.cut_after: int | None = None
        self.supports_ranges = True
        self.status = 200
        self.requests: list[tuple[str, str | None, str | None]] = []  # path, Range, Authorization
        hub = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            def log_message(self, *arguments: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def listing(self) -> bytes:
        siblings = [
            {"rfilename": name, "size": len(content), "lfs": {"sha256": hashlib.sha256(content).hexdigest()}}
            for name, content in self.files.items()
        ]
        return json.dumps({"sha": "abc123", "siblings": siblings}).encode()

    def answer(self, http: BaseHTTPRequestHandler) -> None:
        range = http.headers.get("Range")
        self.requests.append((http.path, range, http.headers.get("Authorization")))
        if self.status != 200:
            return http.send_error(self.status)
        if http.path.startswith("/api/"):
            content, start, cut_after = self.listing(), 0, None
        else:
            content = self.files[http.path.removeprefix("/ada/tiny/resolve/abc123/")]
            start = int(range.removeprefix("bytes=").rstrip("-")) if range and self.supports_ranges else 0
            cut_after = self.cut_after
        http.send_response(206 if start else 200)
        http.send_header("Content-Length", str(len(content) - start))
        http.end_headers()
        http.wfile.write(content[start:][:cut_after])


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def get() -> Path:
    return download_hf("ada/tiny", progress=silent, backoff_s=0.01)


def names(directory: Path) -> set[str]:
    return {file.name for file in directory.iterdir() if not file.name.startswith(".")}


def test_what_a_server_needs_is_downloaded_and_nothing_else(hub: Hub, tmp_path: Path) -> None:
    directory = get()
    assert directory == tmp_path / "models" / "hf" / "ada--tiny"
    assert names(directory) == {"config.json", "model.safetensors", "tokenizer.json"}
    assert (directory / "model.safetensors").read_bytes() == WEIGHTS


def test_a_complete_model_needs_no_network(hub: Hub) -> None:
    directory = get()
    hub.server.shutdown()
    hub.server.server_close()
    assert get() == directory


def test_a_connection_that_is_cut_off_is_resumed(hub: Hub) -> None:
    hub.cut_after = 500_000
    assert (get() / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [range for path, range, _ in hub.requests if path.endswith("model.safetensors")]
    assert ranges == [None, "bytes=500000-", "bytes=1000000-"]


def test_a_later_run_goes_on_where_the_first_gave_up(hub: Hub) -> None:
    hub.cut_after = 0
    with pytest.raises(ModelMissing, match=r"cut off.*run the same again"):
        get()
    hub.cut_after = None
    assert (get() / "model.safetensors").read_bytes() == WEIGHTS
    assert sum(path.startswith("/api/") for path, _, _ in hub.requests) == 1


def test_a_part_is_kept_and_continued_even_by_a_server_without_ranges(hub: Hub, tmp_path: Path) -> None:
    hub.supports_ranges = False
    directory = tmp_path / "models" / "hf" / "ada--tiny"
    directory.mkdir(parents=True)
    (directory / "model.safetensors.part").write_bytes(WEIGHTS[:1234])
    assert (get() / "model.safetensors").read_bytes() == WEIGHTS


def test_a_part_of_something_else_is_noticed_and_dropped(hub: Hub, tmp_path: Path) -> None:
    directory = tmp_path / "models" / "hf" / "ada--tiny"
    directory.mkdir(parents=True)
    (directory / "model.safetensors.part").write_bytes(b"x" * 1234)
    with pytest.raises(ModelMissing, match="damaged"):
        get()
    assert (get() / "model.safetensors").read_bytes() == WEIGHTS


def test_the_token_is_sent(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    get()
    assert {authorization for _, _, authorization in hub.requests} == {"Bearer secret"}


@pytest.mark.parametrize(("status", "advice"), [(404, "check its name"), (401, "HF_TOKEN"), (503, "later")])
def test_a_refusal_says_what_to_do(hub: Hub, status: int, advice: str) -> None:
    hub.status = status
    with pytest.raises(ModelMissing, match=advice):
        get()


def test_without_a_network_it_says_so(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelMissing, match="check the network"):
        get()


def test_a_repository_without_safetensors_is_refused(hub: Hub) -> None:
    del hub.files["model.safetensors"]
    with pytest.raises(ModelUnsupported, match="safetensors"):
        get()


def test_something_else_than_a_hub_is_noticed(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "listing", lambda: b"<html>login</html>")
    with pytest.raises(ModelMissing, match="HF_ENDPOINT"):
        get()


def test_a_disk_that_fills_up_is_not_the_network_and_is_told_at_once(hub: Hub, tmp_path: Path) -> None:
    directory = tmp_path / "models" / "hf" / "ada--tiny"
    directory.mkdir(parents=True)
    (directory / "model.safetensors.part").symlink_to("/dev/full")
    with pytest.raises(ModelMissing) as raised:
        download_hf("ada/tiny", progress=silent, backoff_s=0)
    assert raised.value.message == (
        f"cannot store ada/tiny: {directory}/model.safetensors.part: No space left on device; "
        "free some space or set PENSTOCK_HOME elsewhere"
    )
    assert sum(path.endswith("model.safetensors") for path, _, _ in hub.requests) == 1


def test_a_model_larger_than_what_is_free_is_not_begun(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    with pytest.raises(ModelMissing, match=r"1\.3 MB are needed and 1\.0 MB are free; free some space or set"):
        download_hf("ada/tiny", progress=silent)
    assert [path.startswith("/api/") for path, _, _ in hub.requests] == [True]
