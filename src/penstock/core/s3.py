"""S3 and stores that speak its protocol (MinIO, Ceph, R2, Garage): where an s3:// URL leads, and signatures.

Signatures are AWS's version 4, over all headers that are given and the SHA-256 of the body. Buckets are named in the
path where there is an endpoint, and in the host name at AWS. Keys come from the variables that AWS's own tools read.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import sha256
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, urlsplit

from penstock.core.errors import ConfigError

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

    def headers(
        self, method: str, host: str, path: str, body: bytes, at: datetime, *, query: str = ""
    ) -> dict[str, str]:
        """`path` is quoted as it will be sent; `query` is what `canonical_query` makes."""
        stamp, digest = at.strftime("%Y%m%dT%H%M%SZ"), sha256(body).hexdigest()
        headers = {"host": host, "x-amz-content-sha256": digest, "x-amz-date": stamp}
        if self._credentials.session_token:
            headers["x-amz-security-token"] = self._credentials.session_token
        names = ";".join(sorted(headers))
        lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        canonical = f"{method}\n{path}\n{query}\n{lines}\n{names}\n{digest}"
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


class S3Place(NamedTuple):
    """Place that s3://BUCKET/PREFIX?endpoint=https://HOST&region=REGION names."""

    origin: str
    root: str  # the path, unquoted, before an object's key: "/" or "/BUCKET/"
    prefix: str  # of keys, without slashes at its ends
    signer: Signer | None  # None: the environment has no keys

    def signed(self, method: str, path: str, body: bytes = b"", *, query: str = "") -> dict[str, str]:
        """Headers of a request now; none where there are no keys."""
        if self.signer is None:
            return {}
        return self.signer.headers(method, urlsplit(self.origin).netloc, path, body, datetime.now(UTC), query=query)


def s3_place(url: str, environment: Mapping[str, str], *, param: str | None = None) -> S3Place:
    """Raises ConfigError, about `param`."""
    parts = urlsplit(url)
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
    signer = None
    if environment.get("AWS_ACCESS_KEY_ID"):
        signer = Signer(_credentials(environment, param), region)
    if endpoint is None:
        return S3Place(f"https://{bucket}.s3.{region}.amazonaws.com", "/", prefix, signer)
    return S3Place(endpoint.rstrip("/"), f"/{bucket}/", prefix, signer)


def canonical_query(values: Mapping[str, str]) -> str:
    return "&".join(f"{quote(name, safe='')}={quote(values[name], safe='')}" for name in sorted(values))


def error_code(body: bytes) -> str:
    """The error code of S3's XML, as it may be told; nothing else of the body is."""
    code = body.partition(b"<Code>")[2].partition(b"</Code>")[0][:64].decode(errors="replace")
    return f" ({code})" if code.isalnum() else ""


def _credentials(environment: Mapping[str, str], param: str | None) -> Credentials:
    if not environment.get("AWS_SECRET_ACCESS_KEY"):
        raise ConfigError("the environment has no AWS_SECRET_ACCESS_KEY, which an S3 store needs", param=param)
    key_id, secret = environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"]
    return Credentials(key_id, secret, environment.get("AWS_SESSION_TOKEN", ""))
