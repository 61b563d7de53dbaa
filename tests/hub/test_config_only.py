from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.core.errors import ModelCorrupt, ModelMissing, ModelUnsupported
from penstock.hub.config_only import read_config

CONFIG = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class _Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = self.path == "/org/name/resolve/main/config.json"
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(json.dumps(CONFIG).encode() if found else b"")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with http.server.HTTPServer(("127.0.0.1", 0), _Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()
        thread.join()


def write(path: Path, **changes: object) -> str:
    path.write_text(json.dumps(CONFIG | changes))
    return str(path)


@pytest.mark.parametrize("name", ["config.json", "any.json"])
def test_a_file_is_enough(tmp_path: Path, name: str) -> None:
    assert read_config(write(tmp_path / name)).num_layers == 2


def test_a_directory_without_weights_is_enough(tmp_path: Path) -> None:
    write(tmp_path / "config.json")
    assert read_config(str(tmp_path)).hidden_size == 64


@pytest.mark.usefixtures("hub")
def test_of_a_repository_only_its_config_is_read() -> None:
    assert read_config("hf:org/name").num_kv_heads == 2


@pytest.mark.usefixtures("hub")
def test_a_repository_that_is_not_there_is_named() -> None:
    with pytest.raises(ModelMissing, match="org/other"):
        read_config("hf:org/other")


def test_a_family_with_other_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match="deepseek_v3"):
        read_config(write(tmp_path / "config.json", model_type="deepseek_v3", n_routed_experts=8))


@pytest.mark.parametrize("changes", [{"hidden_size": "64"}, {"num_hidden_layers": 0}, {"vocab_size": None}])
def test_a_size_that_is_no_size_is_named(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(ModelCorrupt, match=r"must be a positive whole number|config"):
        read_config(write(tmp_path / "config.json", **changes))
