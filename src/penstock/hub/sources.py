"""Sources of models by what a user types, and the weights cache of this machine over them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from penstock.core.errors import ModelMissing
from penstock.hub.cache.record import read_record
from penstock.hub.cache.room import DEFAULT_LIMIT, LIMIT, CachedModel
from penstock.hub.cache.weights import Source, WeightsCache
from penstock.hub.disk import bytes_in
from penstock.hub.hf_download import HF_PREFIX, HubSource
from penstock.hub.home import models_directory
from penstock.hub.progress import Progress
from penstock.hub.pull import ALIASES, PackageSource
from penstock.hub.remote.s3 import PREFIX as S3_PREFIX
from penstock.hub.remote.s3 import S3Source
from penstock.hub.remote.source import FOLDER as URL_FOLDER
from penstock.hub.remote.source import RemoteSource
from penstock.hub.remote.web import PREFIXES as WEB_PREFIXES
from penstock.hub.remote.web import WebSource

FILE_PREFIX = "file:"
# org/name. No leading dots: none may lead out of the models directory, or to another path of the server.
REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


def weights_cache() -> WeightsCache:
    return WeightsCache(models_directory(), _source_at, os.environ.get(LIMIT) or DEFAULT_LIMIT)


def source_of(spec: str) -> Source | None:
    """None: it names a file or a directory, which stays where it is. An alias wins over a file of the same name."""
    if spec in ALIASES:
        return PackageSource(spec, ALIASES[spec])
    if spec.startswith(HF_PREFIX):
        return HubSource(repository_of(spec))
    return url_source(spec)


def url_source(spec: str) -> RemoteSource | None:
    if spec.startswith(S3_PREFIX):
        return S3Source(spec)
    return WebSource(spec) if spec.startswith(WEB_PREFIXES) else None


def fetched_source(spec: str) -> Source:
    """The same for those who want none but what the cache holds."""
    if (source := source_of(spec)) is None:
        raise ModelMissing(
            f"there is no model named {spec!r}; those that are: {', '.join(ALIASES)}, hf:org/name, or a URL"
        )
    return source


def pull(spec: str, *, progress: Progress) -> Path:
    """Path to open for the model, which is fetched unless it is there."""
    return weights_cache().ensure(fetched_source(spec), progress)


def cached(spec: str) -> CachedModel | None:
    """The model as it is on this machine, with its size and what fetching it took; None: it would be fetched first.
    Asks no network and changes nothing. A spec that names no model at all is for `resolve` to refuse."""
    if (source := source_of(spec)) is not None:
        return weights_cache().cached(source)
    path = local_path(spec)
    num_bytes = bytes_in(path) if path.is_dir() else path.stat().st_size if path.exists() else 0
    return CachedModel(model=spec, place="", path=path, num_bytes=num_bytes)


def local_path(spec: str) -> Path:
    """The path that `file:path`, `file:///path` or a plain path names."""
    return Path(
        spec.removeprefix(FILE_PREFIX).removeprefix("//") if spec.startswith(FILE_PREFIX) else spec
    ).expanduser()


def repository_of(spec: str) -> str:
    repository = spec.removeprefix(HF_PREFIX)
    if not REPOSITORY.fullmatch(repository):
        raise ModelMissing(f"{spec!r} is not of the form hf:org/name")
    return repository


def _source_at(place: str) -> Source | None:
    folder, _, name = place.rpartition("/")
    if folder == "hf" and "--" in name:
        return HubSource(name.replace("--", "/", 1))
    if folder == URL_FOLDER:
        models = models_directory()
        record = read_record(models / place) or read_record(models / ".partial" / place)
        return None if record is None else source_of(record.spec)
    return source_of(place) if place in ALIASES else None
