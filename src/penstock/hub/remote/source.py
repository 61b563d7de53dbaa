"""A model at a URL, as a source of the weights cache: what http(s):// and s3:// have in common.

Files of two versions are never mixed: the listing is made anew by each fetch, and what an earlier one left of another
version goes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import netrc
import os
import re
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from penstock.core.errors import ModelMissing, ModelUnsupported
from penstock.hub.cache.record import RECORD, FileRecord, Record, read_record
from penstock.hub.cache.weights import Reserve
from penstock.hub.hf_download import WANTED, is_weights
from penstock.hub.progress import Progress
from penstock.hub.remote.parts import PASSING, PartsFetch, RemoteFile, TryAgain

if TYPE_CHECKING:
    import httpx2

FOLDER = "url"  # of the cache
INDEX = "model.safetensors.index.json"
INDEX_LIMIT_BYTES = 64 << 20
CONNECT_S, READ_S = 10.0, 20.0
TRIES, PAUSE_S = 3, 1.0  # of a listing


class RemoteSource(ABC):
    def __init__(self, spec: str, *, pause: Callable[[float], None] = time.sleep) -> None:
        self._spec = spec
        self._pause = pause

    @property
    def spec(self) -> str:
        return self._spec

    @property
    def place(self) -> str:
        slug = re.sub(r"[^\w-]+", "-", default_name(self.spec)).strip("-")[:40]
        return f"{FOLDER}/{slug}-{hashlib.sha256(self.spec.encode()).hexdigest()[:12]}"

    @property
    def is_file(self) -> bool:
        """The URL names a GGUF file; else the directory of a model."""
        return urlsplit(self.spec).path.endswith(".gguf")

    def unrecorded(self, directory: Path) -> Record | None:
        """Versions of penstock that kept no records knew no URLs."""
        return None

    def fetch(self, directory: Path, reserve: Reserve, progress: Progress) -> Record:
        with self._errors_in_words(), self._client() as client:
            server = self._server(client)
            files = self._tried(self._listing, server)
            record = self._record(files)
            if (kept := read_record(directory)) is not None and kept.revision != record.revision:
                _empty(directory)
            reserve(record, 0)
            fetch = PartsFetch(server, directory, files, pause=self._pause)
            fetch.run(f"downloading {default_name(self.spec)}", progress)
        return record

    def read_config(self) -> dict[str, Any]:
        """config.json alone, of a directory."""
        with self._errors_in_words(), self._client() as client:
            server = self._server(client)
            (file,) = self._tried(lambda server: [self._config(server)], server)
            return read_document(server, file)

    @abstractmethod
    def _server(self, client: httpx2.Client) -> RemoteServer: ...

    @abstractmethod
    def _listing(self, server: RemoteServer) -> list[RemoteFile]:
        """The files that a model needs. Raises TryAgain."""

    @abstractmethod
    def _config(self, server: RemoteServer) -> RemoteFile: ...

    def _record(self, files: Sequence[RemoteFile]) -> Record:
        told = [(file.name, file.num_bytes, file.version) for file in files]
        return Record(
            spec=self.spec,
            files={file.name: FileRecord(file.num_bytes, file.digest) for file in files},
            model=files[0].name if self.is_file else ".",
            revision=hashlib.sha256(msgspec.json.encode(told)).hexdigest()[:16],
        )

    def _client(self) -> httpx2.Client:
        import httpx2

        return httpx2.Client(
            headers={"accept-encoding": "identity"},
            auth=_netrc(),
            timeout=httpx2.Timeout(READ_S, connect=CONNECT_S),
            limits=httpx2.Limits(max_connections=None),
        )

    def _tried(self, listing: Callable[[RemoteServer], list[RemoteFile]], server: RemoteServer) -> list[RemoteFile]:
        import httpx2

        for number in range(1, TRIES):
            with contextlib.suppress(httpx2.TransportError, TryAgain):
                return listing(server)
            self._pause(PAUSE_S * number)
        return listing(server)

    @contextmanager
    def _errors_in_words(self) -> Iterator[None]:
        """Errors of the library as ours; those of the disk pass."""
        import httpx2

        try:
            yield
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
            raise ModelMissing(f"{shown(self.spec)} is not a URL: {error}") from None
        except (httpx2.HTTPError, TryAgain) as error:
            raise ModelMissing(
                f"could not download {shown(self.spec)}: {str(error) or type(error).__name__}; check the network and "
                "run the same again: parts that are whole are kept"
            ) from None


class RemoteServer(ABC):
    """Requests with what opens the server. Another answer than 200 and 206 is an error in words, unless another try
    may get another, or it is one of `expected`."""

    def __init__(self, client: httpx2.Client) -> None:
        self.client = client

    @abstractmethod
    def get(
        self,
        url: str,
        headers: dict[str, str] | None = None,
        *,
        method: str = "GET",
        expected: Collection[int] = (),
    ) -> contextlib.AbstractContextManager[httpx2.Response]: ...


def read_document(server: RemoteServer, file: RemoteFile) -> dict[str, Any]:
    """A JSON file that must be known before others can be named."""
    if file.num_bytes > INDEX_LIMIT_BYTES:
        raise ModelUnsupported(f"{file.name} has {file.num_bytes} bytes, which no such file has")
    with server.get(file.url) as response:
        if response.status_code in PASSING:
            raise TryAgain(f"the server answers {response.status_code}")
        content = b""
        for chunk in response.iter_raw():
            content += chunk
            if len(content) > INDEX_LIMIT_BYTES:
                break
    try:
        document = json.loads(content)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise ModelUnsupported(f"{file.name} at {shown(file.url)} is not a JSON object; is the address a model's?")
    return document


def shards(index: dict[str, Any]) -> list[str]:
    """The files that an index names; none may lead out of the directory."""
    named = index.get("weight_map")
    names = set(named.values()) if isinstance(named, dict) else set()
    if not names or not all(isinstance(name, str) and is_weights(name) for name in names):
        raise ModelUnsupported(f"{INDEX} names no safetensors files beside it")
    return sorted(names)


def is_model_file(name: str) -> bool:
    return name in WANTED or (name.startswith("model") and is_weights(name))


def default_name(spec: str) -> str:
    """The name to serve the model under: the last part of its path."""
    parts = urlsplit(spec)
    name = parts.path.rstrip("/").rpartition("/")[2] or parts.netloc
    return name.removesuffix(".gguf")


def shown(url: str) -> str:
    """URL without its query and fragment, for messages: queries may hold secrets."""
    return url.partition("#")[0].partition("?")[0]


def _netrc() -> httpx2.Auth | None:
    """Names and passwords of hosts, where the user keeps some."""
    import httpx2

    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return httpx2.NetRCAuth(os.environ.get("NETRC") or os.path.expanduser("~/.netrc"))
    return None


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        if path.name != RECORD:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
