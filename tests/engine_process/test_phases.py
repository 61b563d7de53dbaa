from __future__ import annotations

from penstock.engine_process.phases import Phases


class Ticking:
    """A clock that shows one time after the other."""

    def __init__(self, *times_s: float) -> None:
        self._times_s = iter(times_s)

    def now(self) -> float:
        return next(self._times_s)


def test_each_phase_has_its_time_and_all_is_passed_on() -> None:
    told: list[tuple[str, int, int]] = []
    phases = Phases("import", lambda *phase: told.append(phase), Ticking(100.0, 101.25, 102.0))
    phases("weights", 0, 2)
    phases("weights", 2, 2)
    phases.close()
    assert told == [("import", 0, 0), ("weights", 0, 2), ("weights", 2, 2)]
    assert phases.seconds == {"import": 1.25, "weights": 0.75}
