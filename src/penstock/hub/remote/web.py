"""Models of a web server: `https://HOST/PATH/model.gguf`, or the directory of a Hugging Face model.

`#sha256=HEX` after a file's URL says what it must be, as in pip. Name and password come from .netrc, proxies from the
environment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

from msgspec import structs

from penstock.core.errors import ModelMissing, ModelUnsupported
from penstock.hub.hf_download import WANTED
from penstock.hub.remote.parts import PASSING, RemoteFile, TryAgain, version_of
from penstock.hub.remote.source import INDEX, RemoteServer, RemoteSource, read_document, shards, shown

if TYPE_CHECKING:
    import httpx2

PREFIXES = ("http://", "https://")
_FRAGMENT = re.compile(r"sha256=([0-9a-f]{64})", re.IGNORECASE)
_TOTAL = re.compile(r"bytes (?:\d+-\d+|\*)/(\d+)")
_FIRST_BYTE = {"Range": "bytes=0-0"}  # asks for what a server tells of a file: links that are signed allow no HEAD
_ABSENT = (403, 404, 410)  # stores that do not list answer 403 for what is not there


class WebSource(RemoteSource):
    def __init__(self, spec: str, *, pause: Callable[[float], None] | None = None) -> None:
        super().__init__(spec, **({} if pause is None else {"pause": pause}))
        parts = urlsplit(spec)
        if not parts.hostname:
            raise ModelMissing(f"{shown(spec)!r} names no host")
        if parts.username is not None or parts.password is not None:
            raise ModelMissing("a URL with a password would be told in logs; put name and password into ~/.netrc")
        self._digest = None
        if parts.fragment:
            found = _FRAGMENT.fullmatch(parts.fragment)
            if found is None or not self.is_file:
                raise ModelMissing(f"after '#' of {shown(spec)} only a .gguf file's sha256=HEX is understood")
            self._digest = f"sha256:{found[1].lower()}"

    def _server(self, client: httpx2.Client) -> WebServer:
        return WebServer(client)

    def _listing(self, server: RemoteServer) -> list[RemoteFile]:
        if self.is_file:
            name = urlsplit(self.spec).path.rpartition("/")[2]
            return [structs.replace(self._probed(server, name, self.spec.partition("#")[0]), digest=self._digest)]
        files = [self._config(server)]
        if (index := self._sought(server, INDEX)) is not None:
            names = shards(read_document(server, index))
            files += [index, *(self._probed(server, name, self._url(name)) for name in names)]
        elif (whole := self._sought(server, "model.safetensors")) is not None:
            files.append(whole)
        else:
            raise ModelUnsupported(f"{shown(self.spec)} has neither {INDEX} nor model.safetensors")
        others = sorted(WANTED - {"config.json", INDEX})
        return files + [file for name in others if (file := self._sought(server, name)) is not None]

    def _config(self, server: RemoteServer) -> RemoteFile:
        file = self._sought(server, "config.json")
        if file is None:
            raise ModelMissing(
                f"{shown(self.spec)} has no config.json: give the URL of a .gguf file, or of a directory with "
                "config.json and model.safetensors"
            )
        return file

    def _sought(self, server: RemoteServer, name: str) -> RemoteFile | None:
        """None: there is no such file."""
        url = self._url(name)
        with server.get(url, _FIRST_BYTE, expected=_ABSENT) as response:
            return None if response.status_code in _ABSENT else _told(response, name, url)

    def _url(self, name: str) -> str:
        parts = urlsplit(self.spec)
        return urljoin(parts._replace(path=f"{parts.path.rstrip('/')}/").geturl(), f"{name}?{parts.query}".rstrip("?"))

    def _probed(self, server: RemoteServer, name: str, url: str) -> RemoteFile:
        with server.get(url, _FIRST_BYTE) as response:
            return _told(response, name, url)


def _told(response: httpx2.Response, name: str, url: str) -> RemoteFile:
    """Description of a file from the server's answer. Raises TryAgain, or ModelUnsupported if its size is not told."""
    if response.status_code in PASSING:
        raise TryAgain(f"the server answers {response.status_code}")
    ranged = _TOTAL.fullmatch(response.headers.get("content-range", ""))
    told = ranged[1] if ranged is not None else response.headers.get("content-length", "")
    if not told.isdecimal():
        raise ModelUnsupported(f"{shown(url)} has no size: the server does not tell it")
    return RemoteFile(
        name=name,
        url=url,
        num_bytes=int(told),
        version=version_of(response),
        takes_ranges=response.status_code == 206,
    )


class WebServer(RemoteServer):
    @contextmanager
    def get(
        self,
        url: str,
        headers: dict[str, str] | None = None,
        *,
        method: str = "GET",
        expected: Collection[int] = (),
    ) -> Iterator[httpx2.Response]:
        with self.client.stream(method, url, headers=headers, follow_redirects=True) as response:
            if url.startswith("https:") and response.url.scheme != "https":
                raise ModelMissing(f"{shown(url)} leads to {shown(str(response.url))}, which is not encrypted")
            status = response.status_code
            if status not in (200, 206, *PASSING, *expected) and not _is_empty(response):
                raise _refusal(url, status)
            yield response


def _is_empty(response: httpx2.Response) -> bool:
    """An empty file has no first byte."""
    return response.status_code == 416 and response.headers.get("content-range") == "bytes */0"


def _refusal(url: str, status: int) -> ModelMissing:
    if status == 401:
        return ModelMissing(f"{shown(url)} needs a name and a password: put them into ~/.netrc")
    if status in _ABSENT:
        return ModelMissing(f"{shown(url)} is not there, or not for us: the server answers {status}")
    return ModelMissing(f"the server answers {status} for {shown(url)}")
