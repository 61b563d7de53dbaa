from __future__ import annotations

import io

import pytest

from penstock.hub.progress import ProgressBar, in_minutes


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


def test_the_time_left_is_by_the_pace_since_it_began() -> None:
    stream, seconds = Terminal(), [0.0]
    bar = ProgressBar(stream, unit="layers", clock=lambda: seconds[0])
    for now_s, done in ((0.0, 10), (20.0, 12), (40.0, 30)):  # it goes on with ten that are there
        seconds[0] = now_s
        bar("step 1 of 6: gptq", done, 30)
    lines = stream.getvalue().split("\r\x1b[2K")[1:]
    assert [line.rpartition("] ")[2] for line in lines] == [
        " 33% 10/30 layers",
        " 40% 12/30 layers, 3:00 left",
        "100% 30/30 layers\n",
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
