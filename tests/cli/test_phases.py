from __future__ import annotations

import time

from penstock.cli.phases import Phases


def test_each_phase_has_its_time_and_all_is_passed_on() -> None:
    told: list[tuple[str, int, int]] = []
    phases = Phases("import", lambda *phase: told.append(phase))
    time.sleep(0.02)
    phases("weights", 0, 2)
    phases("weights", 2, 2)
    phases.close()
    assert told == [("import", 0, 0), ("weights", 0, 2), ("weights", 2, 2)]
    assert list(phases.seconds) == ["import", "weights"]
    assert phases.seconds["import"] >= 0.02 > phases.seconds["weights"]
