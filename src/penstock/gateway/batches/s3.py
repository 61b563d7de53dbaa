"""S3 and stores that speak its protocol (MinIO, Ceph, R2, Garage): PUT, GET and DELETE of whole objects, signed.

Signatures are AWS's version 4, over all headers that are sent and the SHA-256 of the body. Buckets are named in the
path where there is an endpoint, and in the host name at AWS. Keys come from the variables that AWS's own tools read.
"""

from __future__ import annotations

import hmac
import http.client
import ssl
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from hashlib import sha256
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, urlsplit

from penstock.core.errors import ConfigError, StoreCorrupt, StoreUnavailable
from penstock.gateway.batches.object_store import checked_name
from penstock.http.ask import Answered, ask

_TIMEOUT_S = 30.0
_TRIES = 4
_FIRST_PAUSE_S = 0.2
_PASSING = (429, 500, 502, 503, 504)  # statuses that another try may not have
_ALGORITHM = "AWS4-HMAC-SHA256"


class Credentials(NamedTuple):
    key_id: str
    secret: str
    session_token: str = ""


class Signer:
    """Signs requests to one region of S3."""

    def __init__(self, credentials: Credentials, region: str) -> None:
        self._credentials = credentials
        self._region = region

    def headers(self, method: str, host: str, path: str, body: bytes, at: datetime) -> dict[str, str]:
        """Headers of a request without a query; `path` is quoted as it will be sent."""
        stamp, digest = at.strftime("%Y%m%dT%H%M%SZ"), sha256(body).hexdigest()
        headers = {"host": host, "x-amz-content-sha256": digest, "x-amz-date": stamp}
        if self._credentials.session_token:
            headers["x-amz-security-token"] = self._credentials.session_token
        names = ";".join(sorted(headers))
        lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        canonical = f"{method}\n{path}\n\n{lines}\n{names}\n{digest}"
        scope = f"{stamp[:8]}/{self._region}/s3/aws4_request"
        told = f"{_ALGORITHM}\n{stamp}\n{scope}\n{sha256(canonical.encode()).hexdigest()}"
        signature = hmac.new(self._key(stamp[:8]), told.encode(), sha256).hexdigest()
        credential = f"{self._credentials.key_id}/{scope}"
        headers["authorization"] = f"{_ALGORITHM} Credential={credential}, SignedHeaders={names}, Signature={signature}"
        return headers

    def _key(self, day: str) -> bytes:
        key = f"AWS4{self._credentials.secret}".encode()
        for part in (day, self._region, "s3", "aws4_request"):
            key = hmac.new(key, part.encode(), sha256).digest()
        return key


class S3Store:
    def __init__(
        self,
        endpoint: str,
        path: str,
        signer: Signer,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """`path`: what comes before an object's name, from the first slash to the last."""
        self._endpoint = endpoint
        self._path = path
        self._signer = signer
        self._now = now
        self._pause = pause
        self._tls = ssl.create_default_context() if endpoint.startswith("https:") else None

    def put(self, name: str, data: bytes) -> None:
        self._call("PUT", name, data)

    def get(self, name: str) -> bytes:
        answered = self._call("GET", name)
        if answered.status == 404:
            raise StoreCorrupt(f"the store of files {self._endpoint} has no object {name}")
        return answered.body

    def delete(self, name: str) -> None:
        self._call("DELETE", name)

    def _call(self, method: str, name: str, body: bytes = b"") -> Answered:
        """An answer that is good, or says that there is no such object. Raises StoreUnavailable for others, the last
        time that it is tried."""
        path = quote(f"{self._path}{checked_name(name)}")
        host = urlsplit(self._endpoint).netloc
        for number in range(_TRIES):
            if number:
                self._pause(_FIRST_PAUSE_S * 2 ** (number - 1))
            headers = self._signer.headers(method, host, path, body, self._now())
            try:
                answered = ask(self._endpoint, method, path, body, headers=headers, timeout_s=_TIMEOUT_S, tls=self._tls)
            except (OSError, http.client.HTTPException) as error:
                problem = str(error) or type(error).__name__
                continue
            if answered.status < 300 or (answered.status == 404 and method != "PUT"):
                return answered
            problem = f"it answers {method} with status {answered.status}{_code(answered.body)}"
            if answered.status not in _PASSING:
                break
        raise StoreUnavailable(f"the store of files {self._endpoint} does not work: {problem}")


def s3_store(url: str, environment: Mapping[str, str]) -> S3Store:
    """The client of s3://BUCKET/PREFIX?endpoint=https://HOST&region=REGION. Raises ConfigError."""
    parts, param = urlsplit(url), "batches.files"
    asked = dict(parse_qsl(parts.query))
    if unknown := asked.keys() - {"endpoint", "region"}:
        raise ConfigError(f"s3://BUCKET/PREFIX takes endpoint and region, not '{min(unknown)}'", param=param)
    bucket, prefix = parts.netloc, parts.path.strip("/")
    if not bucket or "@" in bucket:
        raise ConfigError("expected s3://BUCKET/PREFIX; keys are read from the environment", param=param)
    region = asked.get("region") or environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    endpoint = asked.get("endpoint") or environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    region = region or "us-east-1"
    if endpoint is not None and urlsplit(endpoint).scheme not in ("http", "https"):
        raise ConfigError(f"the endpoint of an S3 store is a URL, not '{endpoint}'", param=param)
    missing = [name for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY") if not environment.get(name)]
    if missing:
        raise ConfigError(f"the environment has no {missing[0]}, which an S3 store needs", param=param)
    credentials = Credentials(
        environment["AWS_ACCESS_KEY_ID"],
        environment["AWS_SECRET_ACCESS_KEY"],
        environment.get("AWS_SESSION_TOKEN", ""),
    )
    prefix = f"{prefix}/" if prefix else ""
    if endpoint is None:
        place, path = f"https://{bucket}.s3.{region}.amazonaws.com", f"/{prefix}"
    else:
        place, path = endpoint.rstrip("/"), f"/{bucket}/{prefix}"
    return S3Store(place, path, Signer(credentials, region))


def _code(body: bytes) -> str:
    """The error code of S3's XML, as it may be told; nothing else of the body is."""
    code = body.partition(b"<Code>")[2].partition(b"</Code>")[0][:64].decode(errors="replace")
    return f" ({code})" if code.isalnum() else ""
