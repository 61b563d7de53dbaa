from penstock.engine.messages import Loading
from penstock.server.loading import LoadingProgress
from penstock.terminal.progress import PhaseBars
from tests.clocks import ManualClock
from tests.terminal.screens import Terminal, rows


def test_a_slow_start_names_its_phases_and_a_quick_one_says_nothing() -> None:
    clock, lines = ManualClock(), list[str]()
    tell = LoadingProgress(clock, lines.append)
    tell(Loading("import", 0, 0))
    clock.advance(2.0)
    tell(Loading("weights", 0, 30))
    assert lines == []
    clock.advance(2.0)
    tell(Loading("weights", 10, 30))
    clock.advance(1.0)
    tell(Loading("weights", 15, 30))
    clock.advance(5.0)
    tell(Loading("weights", 20, 30))
    clock.advance(1.0)
    tell(Loading("profile", 0, 0))
    assert lines == [
        "    4 s  reading weights, 10 of 30",
        "   10 s  reading weights, 20 of 30",
        "   11 s  measuring a step; on a GPU kernels are compiled, once on a machine",
    ]


def test_a_terminal_sees_a_bar_for_each_phase_and_lines_of_a_later_start() -> None:
    clock, lines, terminal = ManualClock(), list[str](), Terminal()
    tell = LoadingProgress(clock, lines.append, PhaseBars(terminal, clock=clock.now))
    for phase, done, total in (("import", 0, 0), ("weights", 0, 30), ("weights", 10, 30), ("cache", 0, 0)):
        clock.advance(2.0)
        tell(Loading(phase, done, total))
    tell.end(is_ready=True)
    assert [row.split(" ", 2)[2] for row in rows(terminal)] == [
        "importing torch",
        "reading weights 10/30",
        "making the KV cache",
    ]
    assert lines == []
    tell(Loading("import", 0, 0))
    tell.end(is_ready=False)
    assert lines == ["    8 s  importing torch"]
