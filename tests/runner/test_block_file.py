"""The file of a KV block: what is read is what was written, or nothing."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from penstock.runner.block_file import HEADER_BYTES, BlockName, DamagedFile, read_block, write_block

LAYOUT = bytes(range(16))
NAME = BlockName(b"o" * 16, b"p" * 16, 77)
CONTENT = [bytes([part] * 64) for part in range(3)]


def parts(contents: list[bytes]) -> list[memoryview]:
    return [memoryview(bytearray(content)) for content in contents]


def written(directory: Path, name: BlockName = NAME, count: int = 3) -> Path:
    write_block(directory, name, LAYOUT, parts(CONTENT[:count]))
    return directory / name.file_name


def room(count: int = 3) -> list[memoryview]:
    return parts([bytes(64)] * count)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("routing_hash", [None, 0, (1 << 64) - 1])
def test_what_was_written_is_read(tmp_path: Path, count: int, routing_hash: int | None) -> None:
    name = BlockName(b"a" * 16, b"b" * 16, routing_hash)
    path = written(tmp_path, name, count)
    assert BlockName.parse(path.name) == name
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size == HEADER_BYTES + 64 * count
    found = room(count)
    read_block(tmp_path, name, LAYOUT, found)
    assert [bytes(part) for part in found] == CONTENT[:count]
    assert [path.name for path in tmp_path.iterdir()] == [name.file_name]


@pytest.mark.parametrize("name", ["", "x.kv", "aa-bb.kv", "a.kv.part", f"{'aa' * 16}-{'bb' * 16}-1.kv"])
def test_other_names_are_no_blocks(name: str) -> None:
    assert BlockName.parse(name) is None


def test_a_change_of_any_byte_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        with pytest.raises(DamagedFile):
            read_block(tmp_path, NAME, LAYOUT, room())
    path.write_bytes(whole)
    read_block(tmp_path, NAME, LAYOUT, room())


def test_a_file_of_another_length_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    for changed in (b"", *(whole[:length] for length in range(1, len(whole), 7)), whole + b"\0"):
        path.write_bytes(changed)
        with pytest.raises(DamagedFile):
            read_block(tmp_path, NAME, LAYOUT, room())


def test_a_file_of_something_else_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path)
    with pytest.raises(DamagedFile):
        read_block(tmp_path, NAME, bytes(16), room())
    for other in (
        BlockName(b"x" * 16, NAME.parent, NAME.routing_hash),
        BlockName(NAME.own, b"x" * 16, NAME.routing_hash),
        BlockName(NAME.own, NAME.parent, 78),
        BlockName(NAME.own, NAME.parent),
    ):
        (tmp_path / other.file_name).write_bytes(path.read_bytes())
        with pytest.raises(DamagedFile):
            read_block(tmp_path, other, LAYOUT, room())


def test_a_file_that_others_can_have_written_is_not_read(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.chmod(0o660)
    with pytest.raises(DamagedFile, match="others"):
        read_block(tmp_path, NAME, LAYOUT, room())
    elsewhere = tmp_path / "elsewhere"
    path.chmod(0o600)
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(OSError, match="symbolic"):
        read_block(tmp_path, NAME, LAYOUT, room())


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="space"):
        written(tmp_path)
    assert list(tmp_path.iterdir()) == []
