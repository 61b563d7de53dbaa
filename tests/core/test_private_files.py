"""Files that penstock writes are their owner's alone, whatever the process's umask allows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.core.private_files import make_private, open_private
from penstock.hub.disk import locked
from penstock.hub.lora_file import AdapterFile, StoredAdapter
from penstock.hub.watermarks import WatermarkFile
from penstock.tenancy.sqlite import SqliteDatabase


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def for_others(root: Path) -> list[str]:
    return [str(path) for path in (root, *root.rglob("*")) if path.stat().st_mode & 0o077]


def test_directories_that_are_missing_are_made_private_and_others_left_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir(mode=0o755)
    make_private(tmp_path / "there" / "home" / "deep")
    make_private(tmp_path / "there" / "home" / "deep")
    assert for_others(tmp_path / "there") == [str(tmp_path / "there")]


def test_a_file_is_private_when_it_is_made(tmp_path: Path) -> None:
    for mode in ("ab", "wb"):
        with open_private(tmp_path / mode, mode) as file:  # type: ignore[arg-type]
            file.write(b"a")
        assert for_others(tmp_path / mode) == []


def test_files_with_others_data_and_the_home_they_are_in_are_private(tmp_path: Path) -> None:
    home = tmp_path / "home"
    WatermarkFile(home / "watermarks.json").add("mark")
    AdapterFile(home / "adapters" / "model.json").put("one", StoredAdapter("/one"))
    SqliteDatabase(home / "store" / "penstock.db").close()
    with locked(home / "models" / "model.lock", on_wait=lambda: None):
        pass
    assert for_others(home) == []
