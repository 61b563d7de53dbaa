"""Short forms of the drills of a fleet: `make drill-fleet`, `drill-zone`, `drill-spot`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.drills import fleet, spot, zone

pytestmark = [pytest.mark.slow, pytest.mark.drill]


def test_a_fleet_keeps_every_answer_while_it_grows_shrinks_and_loses_its_parts(tmp_path: Path) -> None:
    assert fleet.run(tmp_path, None, 400).wrong == []


def test_a_lost_zones_answers_go_on_in_the_other_and_it_is_used_again_when_it_is_back(tmp_path: Path) -> None:
    assert zone.run(tmp_path, None, 400).wrong == []


def test_spot_replicas_are_replaced_first_and_gone_before_their_deadline(tmp_path: Path) -> None:
    assert spot.run(tmp_path, None, 400).wrong == []
