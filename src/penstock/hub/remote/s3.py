"""Models of S3 and stores that speak its protocol: `s3://BUCKET/PATH/model.gguf`, or a Hugging Face model's prefix.

`?endpoint=https://HOST&region=REGION` or AWS's variables say where; keys come from AWS's variables, and without them
requests are not signed, as public buckets want it.
"""

from __future__ import annotations

import base64
import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import quote

from penstock.core.errors import ModelMissing, ModelUnsupported
from penstock.core.s3 import S3Place, canonical_query, error_code, s3_place
from penstock.hub.hf_download import is_weights
from penstock.hub.remote.parts import PASSING, RemoteFile, TryAgain, version_of
from penstock.hub.remote.source import RemoteServer, RemoteSource, is_model_file, shown

if TYPE_CHECKING:
    import httpx2

PREFIX = "s3://"
_MOST_PAGES = 100  # of a thousand keys
_KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"


class S3Source(RemoteSource):
    def __init__(self, spec: str, *, pause: Callable[[float], None] | None = None) -> None:
        super().__init__(spec, **({} if pause is None else {"pause": pause}))
        self._place = s3_place(spec, os.environ)
        if not self._place.prefix:
            raise ModelMissing(f"{shown(spec)!r} is not of the form s3://BUCKET/PREFIX")

    def _server(self, client: httpx2.Client) -> S3Server:
        return S3Server(client, self._place)

    def _listing(self, server: RemoteServer) -> list[RemoteFile]:
        if self.is_file:
            return [self._probed(server, self._place.prefix, self._place.prefix.rpartition("/")[2])]
        names = [name for name in self._names(server) if is_model_file(name)]
        if "config.json" not in names or not any(map(is_weights, names)):
            raise ModelUnsupported(
                f"{shown(self.spec)} has no config.json with safetensors weights: give a .gguf file or such a prefix"
            )
        return [self._probed(server, f"{self._place.prefix}/{name}", name) for name in sorted(names)]

    def _config(self, server: RemoteServer) -> RemoteFile:
        return self._probed(server, f"{self._place.prefix}/config.json", "config.json")

    def _probed(self, server: RemoteServer, key: str, name: str) -> RemoteFile:
        url = f"{self._place.origin}{quote(self._place.root + key)}"
        with server.get(url, {"x-amz-checksum-mode": "ENABLED"}, method="HEAD") as response:
            if response.status_code in PASSING:
                raise TryAgain(f"the store answers {response.status_code}")
            return RemoteFile(
                name=name,
                url=url,
                num_bytes=int(response.headers["content-length"]),
                version=version_of(response),
                digest=_digest(response),
            )

    def _names(self, server: RemoteServer) -> Iterator[str]:
        """Names of what is below the prefix."""
        prefix = f"{self._place.prefix}/"
        asked = {"list-type": "2", "prefix": prefix}
        for _ in range(_MOST_PAGES):
            url = f"{self._place.origin}{quote(self._place.root.rstrip('/') or '/')}?{canonical_query(asked)}"
            with server.get(url) as response:
                if response.status_code in PASSING:
                    raise TryAgain(f"the store answers {response.status_code}")
                content = response.read()
            keys, following = _page(content)
            yield from (key.removeprefix(prefix) for key in keys)
            if not following:
                return
            asked["continuation-token"] = following
        raise ModelUnsupported(f"{shown(self.spec)} has too many objects to be a model")


class S3Server(RemoteServer):
    def __init__(self, client: httpx2.Client, place: S3Place) -> None:
        super().__init__(client)
        self._place = place

    @contextmanager
    def get(
        self,
        url: str,
        headers: dict[str, str] | None = None,
        *,
        method: str = "GET",
        expected: Collection[int] = (),
    ) -> Iterator[httpx2.Response]:
        path, _, query = url.removeprefix(self._place.origin).partition("?")
        signed = self._place.signed(method, path, query=query)
        with self.client.stream(method, url, headers=(headers or {}) | signed) as response:
            if response.status_code not in (200, 206, *PASSING, *expected):
                raise self._refusal(url, response)
            yield response

    def _refusal(self, url: str, response: httpx2.Response) -> ModelMissing:
        status, code = response.status_code, error_code(response.read())
        if (region := response.headers.get("x-amz-bucket-region")) and status in (301, 307, 400):
            return ModelMissing(f"the bucket of {shown(url)} is in the region {region}: add ?region={region}")
        if status in (401, 403):
            said = "the keys of the environment do not open it" if self._place.signer else f"set {_KEYS}"
            return ModelMissing(f"the store does not let us read {shown(url)}{code}: {said}")
        if status == 404:
            return ModelMissing(f"the store has no {shown(url)}{code}; check its name")
        return ModelMissing(f"the store answers {status} for {shown(url)}{code}")


def _page(content: bytes) -> tuple[list[str], str]:
    """Keys of a page of a listing, and what asks for the next."""
    try:
        root = ElementTree.fromstring(content)
    except ElementTree.ParseError:
        raise ModelMissing("the store does not answer like S3; check the endpoint") from None
    keys = [found.text or "" for found in root.iterfind("{*}Contents/{*}Key")]
    return keys, root.findtext("{*}NextContinuationToken") or ""


def _digest(response: httpx2.Response) -> str | None:
    """The SHA-256 of the object, where its writer had the store keep one; that of several parts is of their hashes."""
    told = response.headers.get("x-amz-checksum-sha256", "")
    if not told or "-" in told or response.headers.get("x-amz-checksum-type", "FULL_OBJECT") != "FULL_OBJECT":
        return None
    return f"sha256:{base64.b64decode(told).hex()}"
