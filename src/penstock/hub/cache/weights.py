"""The cache itself: a model is fetched once, whoever asks, and is there whole and verified or not at all."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from penstock.core.errors import Conflict, ModelCorrupt, ModelMissing
from penstock.core.files import naming
from penstock.core.private_files import make_private
from penstock.hub.cache.entry import Entry, empty_trash
from penstock.hub.cache.record import Record, read_record
from penstock.hub.cache.room import DEFAULT_LIMIT, CachedModel, Need, limit_bytes, size, to_remove
from penstock.hub.disk import bytes_in, cannot_store, locked
from penstock.hub.progress import Progress, silent

FOLDERS = ("hf", "url")  # of models by their sources
TRIES = 2  # to fetch what arrives damaged

Reserve = Callable[[Record, int], None]  # what will be kept, and bytes besides that are needed meanwhile


class Source(Protocol):
    """Origin of a model: a package index, the Hugging Face Hub, a URL."""

    @property
    def spec(self) -> str: ...

    @property
    def place(self) -> str:
        """Its directory in the cache."""

    def unrecorded(self, directory: Path) -> Record | None:
        """Record of what a version of penstock that kept no records left there, if it is whole."""

    def fetch(self, directory: Path, reserve: Reserve, progress: Progress) -> Record:
        """All files into the directory, of which some may be there already. Calls `reserve` when it knows how much
        that is and before it writes. The cache verifies them."""


class WeightsCache:
    def __init__(self, models: Path, source_at: Callable[[str], Source | None], limit: str = DEFAULT_LIMIT) -> None:
        """`source_at` says what belongs to a place; a directory that belongs to no source is not the cache's."""
        self._models = models
        self._source_at = source_at
        self._limit = limit

    def hold(self, source: Source) -> None:
        """Keep the model from being removed before this process ends."""
        self._entry(source).hold()

    def ensure(self, source: Source, progress: Progress = silent) -> Path:
        """Path to open for the model, which is fetched unless it is there."""
        entry = self._entry(source)
        record = self._record(source)
        if record is None:
            with self._changing(source, progress, "store"):
                record = self._record(source) or self._fetch(entry, source, progress)
        return entry.directory / record.model

    def cached(self, source: Source) -> CachedModel | None:
        """None: it is not on this machine, or not all of it."""
        return None if self._record(source) is None else self._described(source)

    def models(self) -> list[CachedModel]:
        """All that is there, whole or not."""
        roots = (self._models, self._models / ".partial")
        found = {path.name for root in roots for path in _directories(root)}
        for folder in FOLDERS:
            found |= {f"{folder}/{path.name}" for root in roots for path in _directories(root / folder)}
        sources = (self._source_at(place) for place in sorted(found))
        return [self._described(source) for source in sources if source is not None]

    def limit_bytes(self) -> int:
        make_private(self._models)
        return limit_bytes(self._limit, shutil.disk_usage(self._models).total)

    def remove(self, source: Source) -> int:
        """The bytes that it had."""
        entry = self._entry(source)
        num_bytes = bytes_in(entry.directory) + bytes_in(entry.partial)
        if not num_bytes:
            raise _not_cached(source)
        if self._described(source).pinned:
            raise Conflict(f"{source.spec} is pinned; `penstock models unpin {source.spec}` first")
        with _naming(source, "remove"), entry.claimed() as is_free:
            if not is_free:
                raise Conflict(f"{source.spec} is used by a process that runs; stop it first")
            entry.remove()
        return num_bytes

    def pin(self, source: Source, pinned: bool) -> None:
        with self._changing(source, silent, "pin" if pinned else "unpin"):
            if (record := self._record(source)) is None:
                raise _not_cached(source)
            replace(record, pinned=pinned).write(self._entry(source).directory)

    def verify(self, source: Source, progress: Progress = silent) -> list[str]:
        """Files that are not what they should be, by reading all. A model that has some is taken out of the cache
        and never served: the next to ask for it fetches them again."""
        entry = self._entry(source)
        with self._changing(source, progress, "verify"):
            if (record := self._record(source) or read_record(entry.directory)) is None:
                raise _not_cached(source)
            if damaged := record.damaged(entry.directory, progress):
                for name in damaged:
                    (entry.directory / name).unlink(missing_ok=True)
                replace(record, verified_at=None).write(entry.directory)
                entry.take_back()
            else:
                replace(record, verified_at=time.time()).write(entry.directory)
        return damaged

    def _entry(self, source: Source) -> Entry:
        return Entry(self._models, source.place)

    def _record(self, source: Source) -> Record | None:
        """Record of a model that is whole; else None."""
        directory = self._entry(source).directory
        if (record := read_record(directory)) is None:
            if (found := source.unrecorded(directory)) is None:
                return None
            fetched_at = directory.stat().st_mtime  # that version verified it then
            return replace(found, fetched_at=fetched_at, verified_at=fetched_at)
        return record if record.verified_at is not None and record.is_whole(directory) else None

    def _fetch(self, entry: Entry, source: Source, progress: Progress) -> Record:
        began_s = time.monotonic()
        entry.take_back()
        make_private(entry.partial)
        kept = read_record(entry.partial)
        there_bytes = 0 if kept is None else kept.num_bytes - kept.missing_bytes(entry.partial)
        for attempt in range(TRIES):
            try:
                record = source.fetch(entry.partial, partial(self._reserve, entry, source, progress), progress)
            finally:
                with contextlib.suppress(OSError):
                    entry.partial.rmdir()  # if nothing came
            if not (damaged := record.damaged(entry.partial, progress)):
                break
            for name in damaged:
                (entry.partial / name).unlink(missing_ok=True)
            if attempt + 1 < TRIES:
                progress(f"{', '.join(damaged)} arrived damaged; fetching again", 0, None)
        else:
            raise ModelCorrupt(
                f"{', '.join(damaged)} of {source.spec} arrived damaged {TRIES} times (wrong size or checksum) and "
                "was deleted; try again later, or another mirror"
            )
        now = time.time()
        record = replace(
            record.with_digests(entry.partial, progress),
            pinned=_is_pinned(entry.partial),
            fetched_at=now,
            verified_at=now,
            fetch_s=time.monotonic() - began_s,
            fetched_bytes=record.num_bytes - there_bytes,
        )
        record.write(entry.partial)
        entry.publish()
        return record

    def _reserve(self, entry: Entry, source: Source, progress: Progress, record: Record, extra_bytes: int) -> None:
        """Room for a model that is about to be fetched: others that fetch see what it will take."""
        with locked(self._models / ".locks" / "room", on_wait=lambda: None):
            empty_trash(self._models)
            need = Need(record.num_bytes, record.missing_bytes(entry.partial) + extra_bytes)
            while removed := self._to_remove(source, need):
                for model in removed:
                    self._remove_unused(model, progress)
            replace(record, pinned=_is_pinned(entry.partial)).write(entry.partial)

    def _to_remove(self, source: Source, need: Need) -> list[CachedModel]:
        others = [model for model in self.models() if model.model != source.spec]
        free_bytes = shutil.disk_usage(self._models).free
        return to_remove(others, need, limit=self.limit_bytes(), free_bytes=free_bytes)

    def _remove_unused(self, model: CachedModel, progress: Progress) -> None:
        entry = Entry(self._models, model.place)
        with entry.claimed() as is_free:
            if is_free:
                entry.remove()
                progress(f"removed {model.model} ({size(model.num_bytes)}) to make room", 0, None)

    def _described(self, source: Source) -> CachedModel:
        entry = self._entry(source)
        whole = self._record(source)
        record = whole or read_record(entry.partial) or Record(spec=source.spec, files={})
        is_fetched = entry.is_being_changed()
        stored_bytes = bytes_in(entry.directory) + bytes_in(entry.partial)
        return CachedModel(
            model=source.spec,
            place=entry.place,
            path=entry.partial if whole is None else entry.directory / whole.model,
            num_bytes=max(stored_bytes, record.num_bytes) if is_fetched else stored_bytes,
            state="partial" if whole is None else "complete",
            is_in_use=is_fetched or entry.is_in_use(),
            pinned=record.pinned,
            last_used_at=max(entry.last_used_at() or 0.0, record.fetched_at or 0.0) or None,
            fetched_at=record.fetched_at,
            fetch_s=record.fetch_s,
            fetched_bytes=record.fetched_bytes,
            verified_at=record.verified_at,
            revision=record.revision,
        )

    @contextlib.contextmanager
    def _changing(self, source: Source, progress: Progress, verb: str) -> Iterator[None]:
        def on_wait() -> None:
            progress(f"another process is fetching or changing {source.spec}", 0, None)

        with _naming(source, verb), naming(self._models), locked(self._entry(source).lock, on_wait=on_wait):
            yield


@contextlib.contextmanager
def _naming(source: Source, verb: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise cannot_store(source.spec, error, verb) from None


def _directories(root: Path) -> Iterator[Path]:
    if root.is_dir():
        yield from (path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def _is_pinned(directory: Path) -> bool:
    record = read_record(directory)
    return record is not None and record.pinned


def _not_cached(source: Source) -> ModelMissing:
    return ModelMissing(f"{source.spec} is not in the cache; `penstock models pull {source.spec}` fetches it")
