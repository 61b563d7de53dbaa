"""A fake of S3: a server that keeps objects in memory, and takes only requests that are signed as AWS wants it.

The signature is worked out from what arrived, step by step as AWS's documentation has it, and from nothing of the
client's code.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import threading
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote
from xml.sax.saxutils import escape

KEY_ID, SECRET, REGION = "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "eu-central-1"
KEYS = {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET}


@dataclass
class FakeS3:
    objects: dict[str, bytes] = field(default_factory=dict)  # by path
    failures: list[int] = field(default_factory=list)  # statuses of the next answers
    is_public: bool = False  # requests that are not signed are answered
    keeps_checksums: bool = True
    page_size: int = 1000  # keys of a listing
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
            headers: dict[str, str] = {}
            if status == 200 and self.command in ("GET", "HEAD") and "?" not in self.path:
                status, data, headers = self._ranged(data)
            s3.answers[status] += 1
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if status != 204:
                self.send_header("content-length", str(len(data)))
            self.end_headers()
            if status != 204 and self.command != "HEAD":
                self.wfile.write(data)

        def _ranged(self, data: bytes) -> tuple[int, bytes, dict[str, str]]:
            headers = {"etag": f'"{hashlib.md5(data).hexdigest()}"'}
            if s3.keeps_checksums and self.headers.get("x-amz-checksum-mode") == "ENABLED":
                headers["x-amz-checksum-sha256"] = b64encode(hashlib.sha256(data).digest()).decode()
                headers["x-amz-checksum-type"] = "FULL_OBJECT"
            if (asked := self.headers.get("range")) is None:
                return 200, data, headers
            first, last = map(int, asked.removeprefix("bytes=").split("-"))
            headers["content-range"] = f"bytes {first}-{min(last, len(data) - 1)}/{len(data)}"
            return 206, data[first : last + 1], headers

        def _do(self, body: bytes) -> tuple[int, bytes]:
            if s3.failures:
                return s3.failures.pop(0), b"<Error><Code>SlowDown</Code></Error>"
            try:
                if not s3.is_public or "authorization" in self.headers:
                    _signature(self, body)
            except (AssertionError, KeyError, AttributeError):
                return 403, b"<Error><Code>SignatureDoesNotMatch</Code></Error>"
            if self.command == "PUT":
                s3.objects[self.path] = body
                return 200, b""
            if self.command == "DELETE":
                s3.objects.pop(self.path, None)
                return 204, b""
            path, _, query = self.path.partition("?")
            if query:
                return 200, _listing(s3, path, dict(parse_qsl(query)))
            found = s3.objects.get(self.path)
            return (404, b"<Error><Code>NoSuchKey</Code></Error>") if found is None else (200, found)

        do_GET = do_HEAD = do_PUT = do_DELETE = _answer

        def log_message(self, *_: Any) -> None: ...

    return Handler


def _listing(s3: FakeS3, bucket: str, asked: dict[str, str]) -> bytes:
    """A page of ListObjectsV2."""
    assert asked["list-type"] == "2"
    keys = sorted(unquote(path).removeprefix(f"{bucket}/") for path in s3.objects if path.startswith(f"{bucket}/"))
    prefix, after = asked["prefix"], asked.get("continuation-token", "")
    found = [key for key in keys if key.startswith(prefix) and key > after]
    page = found[: s3.page_size]
    told = "".join(f"<Contents><Key>{escape(key)}</Key></Contents>" for key in page)
    if len(found) > len(page):
        told += f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
    return f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{told}</ListBucketResult>'.encode()


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
