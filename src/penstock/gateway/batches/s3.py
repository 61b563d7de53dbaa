"""S3 as a store of files: PUT, GET and DELETE of whole objects, signed."""

from __future__ import annotations

import http.client
import ssl
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from urllib.parse import quote, urlsplit

from penstock.core.errors import ConfigError, StoreCorrupt, StoreUnavailable
from penstock.core.s3 import Signer, error_code, s3_place
from penstock.gateway.batches.object_store import checked_name
from penstock.http.ask import Answered, ask

_TIMEOUT_S = 30.0
_TRIES = 4
_FIRST_PAUSE_S = 0.2
_PASSING = (429, 500, 502, 503, 504)  # statuses that another try may not have


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
            problem = f"it answers {method} with status {answered.status}{error_code(answered.body)}"
            if answered.status not in _PASSING:
                break
        raise StoreUnavailable(f"the store of files {self._endpoint} does not work: {problem}")


def s3_store(url: str, environment: Mapping[str, str]) -> S3Store:
    """The client of s3://BUCKET/PREFIX?endpoint=https://HOST&region=REGION. Raises ConfigError."""
    param = "batches.files"
    place = s3_place(url, environment, param=param)
    if place.signer is None:
        raise ConfigError("the environment has no AWS_ACCESS_KEY_ID, which an S3 store needs", param=param)
    return S3Store(place.origin, f"{place.root}{place.prefix}/" if place.prefix else place.root, place.signer)
