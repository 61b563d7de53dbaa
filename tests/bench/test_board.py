"""The line that says how a load goes."""

from __future__ import annotations

import io

import pytest

from penstock.bench import board as module
from penstock.bench.board import Board
from penstock.bench.lag import LagWatch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    return now


def test_it_says_which_step_it_is_and_how_long_all_of_them_will_take(clock: list[float]) -> None:
    board = Board()
    board.step, board.after_s = "step 3 of about 9", 120.0
    board.begin("2 req/s", None, 20.0)
    clock[0] += 5.0
    line = board.line(0.0)
    assert line.startswith("step 3 of about 9  2 req/s  0 in 5 of 20 s  ")
    assert line.endswith("  2:15 left")


def test_of_so_many_requests_the_time_left_is_by_their_pace(clock: list[float]) -> None:
    board = Board()
    board.begin("1 client", 10, None)
    clock[0] += 6.0
    assert "left" not in board.line(0.0)
    for _ in range(4):
        board.conversation_over()
    assert board.line(0.0).endswith("  0:09 left")
    board.step = "step 1 of 2"
    assert board.line(0.0).endswith("  0:09 left of this step")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
async def test_how_it_ended_is_shown_last_with_a_bar_on_a_terminal_alone(
    kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    stream = kind()
    board = Board(stream)
    board.begin("1 client", 2, None)
    async with board.shown(LagWatch()):
        board.begun()
        board.ended(0.1, 5, None)
        board.conversation_over()
    last = [line for line in stream.getvalue().splitlines() if "1 client" in line][-1]
    assert "1/2" in last
    assert ("━" in last) == ("\x1b" in last) == (kind is Terminal)
