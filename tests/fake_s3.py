"""A fake of S3: a server that keeps objects in memory, and takes only requests that are signed as AWS wants it.

The signature is worked out from what arrived, step by step as AWS's documentation has it, and from nothing of the
client's code.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY_ID, SECRET, REGION = "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "eu-central-1"
KEYS = {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET}


@dataclass
class FakeS3:
    objects: dict[str, bytes] = field(default_factory=dict)  # by path
    failures: list[int] = field(default_factory=list)  # statuses of the next answers
    answers: Counter[int] = field(default_factory=Counter)
    url: str = ""


def _signature(handler: BaseHTTPRequestHandler, body: bytes) -> str:
    said = handler.headers["authorization"].removeprefix("AWS4-HMAC-SHA256 ")
    parts = dict(part.strip().split("=", 1) for part in said.split(","))
    key_id, *scope = parts["Credential"].split("/")
    assert (key_id, scope[1:]) == (KEY_ID, [REGION, "s3", "aws4_request"])
    digest = hashlib.sha256(body).hexdigest()
    assert handler.headers["x-amz-content-sha256"] == digest
    signed = parts["SignedHeaders"].split(";")
    assert {"host", "x-amz-content-sha256", "x-amz-date"} <= set(signed)
    path, _, query = handler.path.partition("?")
    canonical = "\n".join(
        [
            handler.command,
            path,
            query,
            *(f"{name}:{handler.headers[name].strip()}" for name in signed),
            "",
            ";".join(signed),
            digest,
        ]
    )
    date = handler.headers["x-amz-date"]
    assert date[:8] == scope[0]
    to_sign = "\n".join(["AWS4-HMAC-SHA256", date, "/".join(scope), hashlib.sha256(canonical.encode()).hexdigest()])
    key = b"AWS4" + SECRET.encode()
    for part in scope:
        key = hmac.digest(key, part.encode(), "sha256")
    assert hmac.digest(key, to_sign.encode(), "sha256").hex() == parts["Signature"]
    return parts["Signature"]


def _handler(s3: FakeS3) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", "0")))
            status, data = self._do(body)
            s3.answers[status] += 1
            self.send_response(status)
            if status != 204:
                self.send_header("content-length", str(len(data)))
            self.end_headers()
            if status != 204:
                self.wfile.write(data)

        def _do(self, body: bytes) -> tuple[int, bytes]:
            if s3.failures:
                return s3.failures.pop(0), b"<Error><Code>SlowDown</Code></Error>"
            try:
                _signature(self, body)
            except (AssertionError, KeyError, AttributeError):
                return 403, b"<Error><Code>SignatureDoesNotMatch</Code></Error>"
            if self.command == "PUT":
                s3.objects[self.path] = body
                return 200, b""
            if self.command == "DELETE":
                s3.objects.pop(self.path, None)
                return 204, b""
            found = s3.objects.get(self.path)
            return (404, b"<Error><Code>NoSuchKey</Code></Error>") if found is None else (200, found)

        do_GET = do_PUT = do_DELETE = _answer

        def log_message(self, *_: Any) -> None: ...

    return Handler


@contextlib.contextmanager
def fake_s3() -> Iterator[FakeS3]:
    found = FakeS3()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(found))
    found.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
