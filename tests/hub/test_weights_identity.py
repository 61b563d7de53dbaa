"""Digests by which two machines find that they have the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.hub.weights_identity import weights_identity

SIZE = 300_000


def write(directory: Path, *, change_at: int | None = None, size: int = SIZE, name: str = "a.safetensors") -> Path:
    directory.mkdir()
    data = bytearray(bytes(range(251)) * (size // 251 + 1))[:size]
    if change_at is not None:
        data[change_at] ^= 1
    (directory / name).write_bytes(data)
    (directory / "README.md").write_text(str(directory))
    return directory


def test_the_same_weights_elsewhere_are_the_same(tmp_path: Path) -> None:
    one, other = write(tmp_path / "one"), write(tmp_path / "other")
    assert weights_identity(one) == weights_identity(other)
    assert weights_identity(one).keys() == {"a.safetensors"}
    assert weights_identity(one / "a.safetensors") == weights_identity(one)


@pytest.mark.parametrize("other", [{"change_at": 0}, {"change_at": SIZE - 1}, {"size": SIZE - 1}, {"name": "b.gguf"}])
def test_others_are_not(tmp_path: Path, other: dict[str, int]) -> None:
    assert weights_identity(write(tmp_path / "one")) != weights_identity(write(tmp_path / "other", **other))  # type: ignore[arg-type]


def test_a_fine_tune_differs_though_its_beginning_and_end_do_not(tmp_path: Path) -> None:
    one, other = write(tmp_path / "one"), write(tmp_path / "other")
    with (other / "a.safetensors").open("r+b") as file:
        file.seek(100_000)
        file.write(bytes(100_000))
    assert weights_identity(one) != weights_identity(other)


def test_a_small_or_empty_file_has_a_digest(tmp_path: Path) -> None:
    small, empty = write(tmp_path / "small", size=10), write(tmp_path / "empty", size=0)
    assert weights_identity(small) != weights_identity(empty)
