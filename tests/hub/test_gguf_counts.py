"""Counts and lengths in a GGUF file that it has no room for: told before anything is made for them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from penstock.core.errors import ModelCorrupt
from penstock.hub import gguf_file
from penstock.hub.gguf_file import ARRAY, STRING, GGUFFile


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def head(num_tensors: int, num_keys: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys)


def array(kind: int, count: int) -> bytes:
    return head(0, 1) + text(b"a") + struct.pack("<IIQ", ARRAY, kind, count)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (head(2**63, 0), "entries run past the end"),
        (head(0, 2**63), "entries run past the end"),
        (array(STRING, 2**40), "entries run past the end"),
        (array(0, 2**63), "entries run past the end"),
        (head(0, 1) + struct.pack("<Q", 2**63), "runs past the end"),
        (head(1, 0) + text(b"w") + struct.pack("<I", 2**31), "dimensions; the most is 8"),
        (head(1, 0) + text(b"w") + struct.pack("<I9Q", 9, *[2**60] * 9), "9 dimensions"),
        (head(0, 1) + text(b"general.alignment") + struct.pack("<II", 4, 0), "an alignment of 0"),
        (head(0, 1) + text(b"general.alignment") + struct.pack("<Ii", 5, -1), "an alignment of -1"),
    ],
)
def test_a_count_that_the_file_has_no_room_for_is_told(data: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data.ljust(64, b"\0"))
    with pytest.raises(ModelCorrupt, match=problem):
        GGUFFile(path)


def test_an_array_of_metadata_has_a_bound_though_the_file_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its values become Python's, of many times the size."""
    monkeypatch.setattr(gguf_file, "MAX_ARRAY", 1000)
    path = tmp_path / "model.gguf"
    path.write_bytes(array(0, 1001) + bytes(1001))
    with pytest.raises(ModelCorrupt, match="the most is 1,000"):
        GGUFFile(path)
