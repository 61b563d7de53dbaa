"""The keys of watermarks, by name, in a file of their own that nobody but its owner may read.

A name stands for all of a watermark: its secret and its settings. Settings, requests, tenants and gateways know names
only; the secrets are in this file and in the memory of the replicas that use them. `PENSTOCK_WATERMARKS` names the
file, else it is `watermarks.json` in penstock's home.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.core.config import nearest
from penstock.core.converter import Converter
from penstock.core.errors import ConfigError, Conflict, InvalidValue, KeyNotFound
from penstock.core.private_files import make_private
from penstock.core.watermark import KEY_BYTES, NAME_PATTERN, Delta, Gamma, Name, Scheme, Seeding, Watermark, Width
from penstock.hub.home import penstock_home

Secret = Annotated[str, Meta(pattern=f"^[0-9a-f]{{{2 * KEY_BYTES}}}$")]


class StoredMark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    secret: Secret
    scheme: Scheme = Scheme.GREEN
    gamma: Gamma = 0.25
    delta: Delta = 2.0
    width: Width = 4
    seeding: Seeding = Seeding.LEFT
    created_at: float = 0.0  # seconds since 1970

    def to_watermark(self) -> Watermark:
        return Watermark(bytes.fromhex(self.secret), self.scheme, self.gamma, self.delta, self.width, self.seeding)


_stored_mark_converter = Converter(StoredMark)


_Marks = dict[Name, StoredMark]


_marks_decoder = msgspec.json.Decoder(_Marks)


class WatermarkFile:
    """File of watermarks. Its methods block: call them in a thread. Every later reader sees a mark that was added."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def at(cls, named: str | None) -> WatermarkFile:
        """File at the path of a setting, or else where it is by default."""
        named = named or os.environ.get("PENSTOCK_WATERMARKS")
        return cls(Path(named).expanduser() if named else penstock_home() / "watermarks.json")

    def read(self) -> dict[str, StoredMark]:
        """All of them, by name; none where there is no file."""
        try:
            if self.path.stat().st_mode & 0o077:
                raise ConfigError(f"{self.path} holds secrets, and others may read it: chmod 600 {self.path}")
            return _marks_decoder.decode(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except msgspec.DecodeError:  # what it says may hold a secret
            raise ConfigError(f"{self.path} is not a file of watermarks") from None
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror}") from None

    def find(self, name: str) -> Watermark:
        known = self.read()
        if name not in known:
            meant = nearest(name, known)
            hint = f"; did you mean '{meant}'?" if meant else f": penstock watermark add {name}" if not known else ""
            raise KeyNotFound(f"there is no watermark '{name}' in {self.path}{hint}")
        return known[name].to_watermark()

    def add(self, name: str, **settings: Any) -> StoredMark:
        """Adds a watermark with a new secret and returns it."""
        values = {**settings, "secret": secrets.token_hex(KEY_BYTES), "created_at": time.time()}
        if not re.match(NAME_PATTERN, name):
            raise InvalidValue(f"a watermark's name has lower-case letters, digits, . _ -, and '{name}' has others")
        try:
            mark = _stored_mark_converter.convert(values)
            mark.to_watermark()
        except (msgspec.ValidationError, ValueError) as error:
            raise InvalidValue(f"watermark '{name}': {error}") from None
        with self._changing() as marks:
            if name in marks:
                raise Conflict(f"there is a watermark '{name}' already; a new secret needs a new name")
            marks[name] = mark
        return mark

    def remove(self, name: str) -> None:
        with self._changing() as marks:
            if marks.pop(name, None) is None:
                raise KeyNotFound(f"there is no watermark '{name}' in {self.path}")

    @contextmanager
    def _changing(self) -> Iterator[dict[str, StoredMark]]:
        """One process at a time; whoever reads sees the file as it was, or as it is afterwards."""
        make_private(self.path.parent)
        lock = self.path.with_name(f"{self.path.name}.lock")
        with os.fdopen(os.open(lock, os.O_RDWR | os.O_CREAT, 0o600), "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            marks = self.read()
            yield marks
            content = msgspec.json.format(msgspec.json.encode(marks), indent=2) + b"\n"
            written = self.path.with_name(f"{self.path.name}.written")
            with os.fdopen(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as copy:
                copy.write(content)
            written.rename(self.path)
