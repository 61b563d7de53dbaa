from __future__ import annotations

import io
import sys

import pytest

from penstock.terminal.tables import aligned, print_table

ROWS = [("a", "1", "x y"), ("long-name", "1,234.5", "[red]z[/red]")]


def test_columns_are_as_wide_as_they_must_be() -> None:
    assert aligned(ROWS, left=(0, 2)) == ["a                1  x y", "long-name  1,234.5  [red]z[/red]"]
    assert aligned(ROWS) == ["a                1           x y", "long-name  1,234.5  [red]z[/red]"]


def test_a_pipe_gets_whole_lines_and_numbers_end_at_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    wide = "w" * 300
    print_table(("NAME", "NUMBER", "TEXT"), [*ROWS, ("b", "-", wide)])
    assert capsys.readouterr().out.splitlines() == [
        "NAME        NUMBER  TEXT",
        "a                1  x y",
        "long-name  1,234.5  [red]z[/red]",
        f"b                -  {wide}",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_its_head_in_bold_and_folds_what_is_too_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_table(("NAME", "TEXT"), [("a", "x" * 60)])
    head, *rows = terminal.getvalue().splitlines()
    assert head.startswith("\x1b[1mNAME")
    assert "".join(row.strip().removeprefix("a").strip() for row in rows) == "x" * 60
    assert max(map(len, rows)) <= 40
