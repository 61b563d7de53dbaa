"""A small OpenAI-compatible server that does as it is told: answers, fails, dawdles, or is not there."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.waiting import GIVE_UP_S


@dataclass
class Provider:
    port: int = 0
    says: str = "hello"
    status: int = 200  # of what it generates
    error: str = "it broke"
    hates: str = ""  # a word in a request that makes it fail with `hates_status`
    hates_status: int = 500
    code: str | None = None
    delay_s: float = 0.0  # before it answers
    may_answer: threading.Event = field(default_factory=threading.Event)  # set, unless it shall dawdle
    health: int = 404  # the status of GET /health
    models: int = 200  # and of GET /v1/models
    asked: list[dict[str, Any]] = field(default_factory=list)  # the bodies
    headers: list[dict[str, str]] = field(default_factory=list)  # that came with them
    probes: list[str] = field(default_factory=list)
    message: dict[str, Any] | None = None  # of a whole chat, in place of one that says `says`
    vectors: dict[str, list[float]] = field(default_factory=dict)  # embeddings of texts
    logprobs: list[float] | None = None  # of a prompt's tokens, where they are asked for; None: it does not know them
    num_left: int = 0  # clients that went before they were answered

    def __post_init__(self) -> None:
        self.may_answer.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def providing(*, dawdles: bool = False, **options: Any) -> Iterator[Provider]:
    """`dawdles`: it answers when the test says that it may."""
    provider = Provider(**options)
    if dawdles:
        provider.may_answer.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _speaking_for(provider))
    server.daemon_threads = True
    provider.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield provider
    finally:
        provider.may_answer.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _speaking_for(provider: Provider) -> type[BaseHTTPRequestHandler]:
    class Speaker(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # head and body are two writes

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            statuses = {"/health": provider.health, "/v1/models": provider.models}
            if self.path in statuses:
                provider.probes.append(self.path)
            self._answer(statuses.get(self.path, 404), {})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            provider.asked.append(asked)
            provider.headers.append({name.lower(): value for name, value in self.headers.items()})
            time.sleep(provider.delay_s)
            provider.may_answer.wait(GIVE_UP_S)
            try:
                self._look_for_client()
                self._generate(asked)
            except OSError:
                provider.num_left += 1
                self.close_connection = True

        def _look_for_client(self) -> None:
            """Fails if the client has closed its end: a first write would still succeed."""
            with contextlib.suppress(BlockingIOError):
                if self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"":
                    raise BrokenPipeError

        def _generate(self, asked: dict[str, Any]) -> None:
            usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
            common = {"id": "x", "created": 1, "model": asked["model"]}
            is_hated = bool(provider.hates) and provider.hates in json.dumps(asked)
            if provider.vectors and "input" in asked:
                found = [provider.vectors[text] for text in asked["input"]]
                data = [{"index": index, "embedding": vector} for index, vector in enumerate(found)]
                self._answer(200, {"data": data, "usage": usage})
                return
            if "prompt_logprobs" in asked and provider.logprobs is not None:
                common["prompt_logprobs"] = [None] + [{"7": {"logprob": one}} for one in provider.logprobs]
            if provider.status != 200 or is_hated:
                error = {"message": provider.error, "code": provider.code, "type": "some_error"}
                self._answer(provider.hates_status if is_hated else provider.status, {"error": error})
            elif asked.get("stream"):
                delta = {"index": 0, "delta": {"role": "assistant", "content": provider.says}, "finish_reason": "stop"}
                chunk = common | {"object": "chat.completion.chunk", "choices": [delta], "usage": usage}
                events = b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n"
                self._send(200, "text/event-stream", events)
            else:
                message = provider.message or {"role": "assistant", "content": provider.says}
                choice = {"index": 0, "message": message, "finish_reason": "stop"}
                self._answer(200, common | {"object": "chat.completion", "choices": [choice], "usage": usage})

        def _answer(self, status: int, content: object) -> None:
            self._send(status, "application/json", json.dumps(content).encode())

        def _send(self, status: int, content_type: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", content_type)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Speaker
