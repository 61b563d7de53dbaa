"""A small Hugging Face Hub on a local port: the model API, the tree, and files with ETags and ranges."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

REVISION = "a" * 40
WEIGHTS = bytes(range(256)) * 5_000


class LocalHub:
    """`cut_after` ends every reply about weights after so many bytes; with `stalls`, it stays open there."""

    def __init__(self) -> None:
        self.files = {
            "config.json": b"{}",
            "model.safetensors": WEIGHTS,
            "tokenizer.json": b'{"a": 1}',
            "README.md": b"not wanted",
            "onnx/model.safetensors": b"not wanted",
        }
        self.damaged: dict[str, int] = {}  # how many times a file is still sent with wrong bytes
        self.cut_after: int | None = None
        self.stalls = False
        self.status = 200
        self.is_html = False
        self.requests: list[tuple[str, str, str | None, str | None]] = []  # method, path, Range, Authorization
        self._go_on = threading.Event()
        hub = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            def do_HEAD(self) -> None:
                hub.answer(self)

            def log_message(self, *arguments: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self._go_on.set()
        self.server.shutdown()
        self.server.server_close()

    def fetches(self, name: str) -> list[str | None]:
        """The ranges in which a file was asked for."""
        return [
            range for method, path, range, _ in self.requests if method == "GET" and path.endswith(f"{REVISION}/{name}")
        ]

    def answer(self, http: BaseHTTPRequestHandler) -> None:
        range = http.headers.get("Range")
        path = http.path.partition("?")[0]
        self.requests.append((http.command, path, range, http.headers.get("Authorization")))
        if self.status != 200:
            return http.send_error(self.status)
        if self.is_html:
            return self._send(http, b"<html>login</html>", {"Content-Type": "text/html"})
        if "/tree/" in path:
            tree = [_entry(name, content) | {"type": "file", "path": name} for name, content in self.files.items()]
            return self._send(http, json.dumps(tree).encode(), {"Content-Type": "application/json"})
        if path.startswith("/api/"):
            siblings = [_entry(name, content) | {"rfilename": name} for name, content in self.files.items()]
            document = {"id": "ada/tiny", "sha": REVISION, "siblings": siblings}
            return self._send(http, json.dumps(document).encode(), {"Content-Type": "application/json"})
        name = path.removeprefix(f"/ada/tiny/resolve/{REVISION}/").removeprefix("/ada/tiny/resolve/main/")
        content = self.files[name]
        headers = {"ETag": f'"{_digest(name, content)}"', "X-Repo-Commit": REVISION}
        if http.command == "GET" and self.damaged.get(name, 0):
            self.damaged[name] -= 1
            content = b"?" + content[1:]
        self._send(http, content, headers, range, name.endswith(".safetensors"))

    def _send(
        self,
        http: BaseHTTPRequestHandler,
        content: bytes,
        headers: dict[str, str],
        range: str | None = None,
        is_weights: bool = False,
    ) -> None:
        start = int(range.removeprefix("bytes=").rstrip("-")) if range else 0
        http.send_response(206 if start else 200)
        for name, value in headers.items():
            http.send_header(name, value)
        http.send_header("Content-Length", str(len(content) - start))
        if start:
            http.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        http.end_headers()
        if http.command == "GET":
            with contextlib.suppress(ConnectionError):  # of a client that was killed
                http.wfile.write(content[start:][: self.cut_after if is_weights else None])
            if is_weights and self.stalls:
                self._go_on.wait()


@contextmanager
def local_hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A hub, and empty caches: ours, and the Hub's own."""
    hub = LocalHub()
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(home / "huggingface"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "huggingface" / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.AGENT_HARNESSES_PATH", str(home / "harnesses.json"))
    monkeypatch.setenv("PENSTOCK_HOME", str(home))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    try:
        yield hub
    finally:
        hub.close()


def _entry(name: str, content: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"size": len(content), "oid": _git(content), "blobId": _git(content)}
    if name.endswith(".safetensors"):
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": sha256, "sha256": sha256, "size": len(content), "pointerSize": 130}
    return entry


def _digest(name: str, content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if name.endswith(".safetensors") else _git(content)


def _git(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
