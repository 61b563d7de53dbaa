from __future__ import annotations

import time

from penstock.engine_process.phases import Phases, process_began_s


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


def test_first_phase_begins_with_the_process_and_its_processor_time_counts_from_there() -> None:
    cpu_s = iter((0.5, 0.75))
    phases = Phases("python", clock=Ticking(12.0, 13.0), began_s=10.0, cpu_s=lambda: next(cpu_s))
    phases("check")
    phases.close()
    assert (phases.seconds, phases.cpu_seconds) == ({"python": 2.0, "check": 1.0}, {"python": 0.5, "check": 0.25})


def test_time_of_another_process_between_two_phases_is_in_neither() -> None:
    cpu_s = iter((0.0, 1.0, 3.0))
    phases = Phases("http", clock=Ticking(0.0, 1.0, 8.0, 9.0), cpu_s=lambda: next(cpu_s))
    phases.close()
    phases.resume("tokenizer")
    phases.close()
    assert phases.seconds == {"http": 1.0, "tokenizer": 1.0}
    assert phases.cpu_seconds == {"http": 1.0, "tokenizer": 2.0}


def test_process_began_before_now() -> None:
    assert 0 < time.monotonic() - process_began_s() < time.clock_gettime(time.CLOCK_BOOTTIME)
