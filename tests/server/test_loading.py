from penstock.engine.messages import Loading
from penstock.server.loading import LoadingLines
from tests.clocks import ManualClock


def test_a_slow_start_names_its_phases_and_a_quick_one_says_nothing() -> None:
    clock, lines = ManualClock(), list[str]()
    tell = LoadingLines(clock, lines.append)
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
