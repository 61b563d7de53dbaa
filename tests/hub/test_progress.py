from __future__ import annotations

import io

from penstock.hub.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_one_line_redrawn_and_then_ended() -> None:
    stream = Terminal()
    bar = ProgressBar(stream)
    for done in (0, 5_000_000, 10_000_000):
        bar("downloading x", done, 10_000_000)
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().endswith("] 100% 10.0/10.0 MB\n")


def test_a_log_sees_few_plain_lines() -> None:
    stream = io.StringIO()
    bar = ProgressBar(stream)
    for done in range(0, 1001):
        bar("downloading x", done, 1000)
    bar("trying again", 0, None)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert "\r" not in stream.getvalue()
    assert lines[-1] == "trying again"
