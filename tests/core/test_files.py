"""Files for a user: an error says which one and why, and comes before the work where it can."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.core.files import check_outputs, in_words, naming, write_file

FULL = Path("/dev/full")  # opens, and refuses every byte as a full disk does


def test_a_full_disk_is_named_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.symlink_to(FULL)
    for content in ("some words", b"some bytes"):
        with pytest.raises(OSError, match="No space left") as raised:
            write_file(path, content)
        assert in_words(raised.value) == f"{path}: No space left on device; free some space or write elsewhere"


def test_a_file_that_is_named_already_stays_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised, naming(tmp_path):
        (tmp_path / "missing").read_text()
    assert in_words(raised.value) == f"{tmp_path}/missing: No such file or directory"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EROFS, "Read-only file system", "/x"), "/x: Read-only file system; write elsewhere"),
        (OSError(errno.ENOSPC, "No space left on device"), "cannot write the output: No space left on device"),
        (OSError("a word"), "a word"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_an_error_is_one_line(error: OSError, said: str) -> None:
    assert in_words(error) == said


def test_what_cannot_be_written_is_told_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_outputs(None, tmp_path / "new.json", FULL)
    with pytest.raises(ConfigError, match=f"there is no directory {tmp_path}/missing"):
        check_outputs(tmp_path / "new.json", tmp_path / "missing" / "new.json")
    with pytest.raises(ConfigError, match="it is a directory"):
        check_outputs(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=r"cannot write .*: Permission denied"):
        check_outputs(tmp_path / "new.json")
