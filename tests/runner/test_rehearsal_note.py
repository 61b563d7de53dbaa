"""What an engine noted of its rehearsal: believed by the next one of the same kind, and not where it cannot be true."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.runner.rehearsal_note import RehearsalNote

GIB = 1 << 30


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))


def test_a_note_is_read_by_the_next_engine_of_its_kind_alone() -> None:
    RehearsalNote.about("llama on an H200").write(3 * GIB, torch_bytes=2 * GIB)
    assert RehearsalNote.about("llama on an H200").read() == 3 * GIB
    assert RehearsalNote.about("llama on an A100").read() is None


@pytest.mark.parametrize(("taken", "torch_bytes"), [(1, 2), (20, 3)])
def test_nothing_is_noted_where_another_process_came_or_went_meanwhile(taken: int, torch_bytes: int) -> None:
    note = RehearsalNote.about("llama")
    note.write(taken * GIB, torch_bytes * GIB)
    assert note.read() is None


def test_a_forgotten_or_broken_note_is_none() -> None:
    note = RehearsalNote.about("llama")
    note.write(3 * GIB, 3 * GIB)
    note.forget()
    note.forget()
    assert note.read() is None
    note.path.write_text("half a")
    assert note.read() is None
