"""The adapters that a served model is to have, by name, in a small file: what was loaded by hand is there again after a
restart. Replicas of one model on one machine share it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import msgspec

from penstock.core.errors import ConfigError
from penstock.core.private_files import open_private
from penstock.hub.disk import locked, publish
from penstock.hub.home import penstock_home


class StoredAdapter(msgspec.Struct, frozen=True, omit_defaults=True):
    path: str
    pinned: bool = False


_Stored = dict[str, StoredAdapter]


_stored_decoder = msgspec.json.Decoder(_Stored)


class AdapterFile:
    """File of the adapters loaded at runtime. Its methods block: use a thread. Readers see it whole, old or new."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, model: str, named: str | None = None) -> AdapterFile:
        """File at the path of a setting, or else the model's own in penstock's home."""
        home = penstock_home() / "adapters"
        return cls(Path(named).expanduser() if named else home / f"{quote(model, safe='')}.json")

    def read(self) -> dict[str, StoredAdapter]:
        try:
            return _stored_decoder.decode(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except msgspec.DecodeError as error:
            raise ConfigError(f"{self.path} is not a file of adapters: {error}") from None
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror}") from None

    def put(self, name: str, adapter: StoredAdapter) -> None:
        with self._changing() as stored:
            stored[name] = adapter

    def remove(self, name: str) -> None:
        if name in self.read():
            with self._changing() as stored:
                stored.pop(name, None)

    @contextmanager
    def _changing(self) -> Iterator[dict[str, StoredAdapter]]:
        try:
            with locked(self.path.with_name(f"{self.path.name}.lock"), on_wait=lambda: None):
                stored = self.read()
                yield stored
                written = self.path.with_name(f"{self.path.name}.part")
                with open_private(written, "wb") as file:
                    file.write(msgspec.json.format(msgspec.json.encode(stored), indent=2) + b"\n")
                publish(written, self.path)
        except OSError as error:
            raise ConfigError(f"cannot write {self.path}: {error.strerror}") from None
