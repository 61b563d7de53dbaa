from __future__ import annotations

import io

import pytest

from penstock.terminal.progress import PhaseBars, ProgressBar, in_minutes
from tests.terminal.screens import Terminal, rows, without_colours


def shown(stream: io.StringIO) -> list[str]:
    """What each drawing of the bar has behind it, without colours."""
    drawn = without_colours(stream).split("\r")
    lines = [line.rpartition("━ ")[2].rstrip() for line in drawn if "━" in line]
    return [line for line, before in zip(lines, [None, *lines], strict=False) if line != before]


def test_a_terminal_sees_one_line_redrawn_and_then_ended() -> None:
    stream = Terminal()
    bar = ProgressBar(stream)
    for done in (0, 5_000_000, 10_000_000):
        bar("downloading x", done, 10_000_000)
    assert stream.getvalue().count("\n") == 1
    assert shown(stream)[-1] == "100% 10.0/10.0 MB 00:00"
    assert stream.getvalue().endswith("\x1b[?25h")  # the cursor is there again


def test_the_time_left_is_by_the_pace_since_it_began() -> None:
    stream, seconds = Terminal(), [0.0]
    bar = ProgressBar(stream, unit="layers", clock=lambda: seconds[0])
    for now_s, done in ((0.0, 10), (10.0, 11), (20.0, 12), (40.0, 30)):  # it goes on with ten that are there
        seconds[0] = now_s
        bar("step 1 of 6: gptq", done, 30)
    assert [line.strip() for line in shown(stream)] == [
        "33% 10/30 layers --:--",
        "37% 11/30 layers --:--",
        "40% 12/30 layers 03:00",
        "100% 30/30 layers 00:00",
    ]


def test_news_stand_on_a_line_of_their_own_between_bars() -> None:
    stream = Terminal()
    bar = ProgressBar(stream)
    bar("downloading x", 5, 10)
    bar("trying again", 0, None)
    bar("downloading x", 10, 10)
    assert "\n\x1b[?25htrying again\n" in stream.getvalue()


def test_a_log_is_told_the_time_that_is_left() -> None:
    stream, seconds = io.StringIO(), [0.0]
    bar = ProgressBar(stream, unit="layers", clock=lambda: seconds[0])
    for now_s, done in ((0.0, 10), (20.0, 12), (40.0, 30)):
        seconds[0] = now_s
        bar("step 1 of 6: gptq", done, 30)
    assert [line.rpartition("] ")[2] for line in stream.getvalue().splitlines()] == [
        " 33% 10/30 layers",
        " 40% 12/30 layers, 3:00 left",
        "100% 30/30 layers",
    ]


@pytest.mark.parametrize(("seconds", "said"), [(6.6, "0:07"), (725, "12:05"), (3723, "1:02:03")])
def test_times_are_of_minutes(seconds: float, said: str) -> None:
    assert in_minutes(seconds) == said


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


def test_phases_stay_on_the_screen_one_bar_each() -> None:
    stream, seconds = Terminal(), [0.0]
    bars = PhaseBars(stream, clock=lambda: seconds[0])
    for now_s, what, done, total in ((0.0, "importing", 0, 0), (3.0, "reading", 0, 30), (4.0, "reading", 30, 30)):
        seconds[0] = now_s
        bars.show(what, done, total)
    bars.finish()
    assert rows(stream) == [f"0:00:03 {'━' * 30} importing", f"0:00:01 {'━' * 30} reading 30/30"]
    assert stream.getvalue().endswith("\x1b[?25h")  # the cursor is there again


def test_a_phase_that_comes_to_nothing_is_not_shown_as_done() -> None:
    stream = Terminal()
    bars = PhaseBars(stream, clock=lambda: 0.0)
    bars.show("reading", 10, 30)
    bars.close()
    bars.finish()
    assert rows(stream) == [f"0:00:00 {'━' * 10}╺{'━' * 19} reading 10/30"]
