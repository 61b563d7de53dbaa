"""A server of several models, asked by its API."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.cli.tiny_model import TINY_CONTEXT

MESSAGES = [{"role": "user", "content": "a"}]
_PATIENCE_S = 300


@dataclass
class Several:
    url: str
    grpc: str = ""

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def chat(self, model: str, **more: Any) -> tuple[int, Any]:
        body = {"model": model, "max_tokens": 3, "ignore_eos": True, "messages": MESSAGES}
        return self.ask("POST", "/v1/chat/completions", body | more)

    def model(self, name: str) -> Any:
        status, found = self.ask("GET", f"/v1/penstock/models/{name}")
        assert status == 200
        return found

    def state(self, name: str) -> str:
        return str(self.model(name)["state"])

    def order(self, name: str, verb: str, body: object = None) -> tuple[int, Any]:
        return self.ask("POST", f"/v1/penstock/models/{name}/{verb}", body or {})

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "penstock.cli.main", "models", *words, "--server", self.url]
        return subprocess.run(command, capture_output=True, text=True)

    @contextlib.contextmanager
    def stream(self, model: str) -> Iterator[Iterator[bytes]]:
        """Lines of an answer that goes on until it is closed."""
        body = {"model": model, "stream": True, "ignore_eos": True, "max_tokens": TINY_CONTEXT // 2}
        data = json.dumps(body | {"messages": MESSAGES}).encode()
        request = urllib.request.Request(f"{self.url}/v1/chat/completions", data)
        with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
            yield iter(answer.readline, b"")


def next_event(lines: Iterator[bytes]) -> Any:
    return next(json.loads(line[6:]) for line in lines if line.startswith(b"data: {"))
