"""Rollouts over the event simulator: what flights took is taken down as gateways do it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from penstock.core.rollout import Arm, Metric
from penstock.rollout.policy.plan import RolloutStep
from penstock.sim.flight import Ask
from penstock.sim.rollout.events import blocks_of_step, slower
from tests.sim.test_simulation import PROFILE


def asks(count: int) -> list[Ask]:
    return [Ask(n * 0.2, 300 + 17 * (n % 20), 20 + n % 30, (n,), f"s{n % 60}", "acme") for n in range(count)]


def test_copies_of_a_slower_version_take_longer_pair_by_pair() -> None:
    blocks = blocks_of_step(asks(150), RolloutStep(shadow=1.0), 0, PROFILE, slower(PROFILE, 1.25), (4, 4))
    cells = [(key, cell) for block in blocks for key, cell in block.cells if not key.tenant]
    counted = {arm: sum(c.count for k, c in cells if (k.metric, k.arm) == (Metric.ERRORS, arm)) for arm in Arm}
    assert counted[Arm.OLD_COPY] == counted[Arm.NEW_COPY] == 150
    assert counted[Arm.OLD] == 0
    pairs = [cell for key, cell in cells if key.arm is Arm.PAIR and key.metric is Metric.TPOT]
    mean = sum(cell.total for cell in pairs) / sum(cell.count for cell in pairs)
    assert mean > 0.1


def test_sessions_are_split_as_gateways_split_them() -> None:
    blocks = blocks_of_step(asks(150), RolloutStep(share=0.5), 3, PROFILE, PROFILE, (2, 2))
    assert {block.step for block in blocks} == {3}
    assert all(later.at > earlier.at for earlier, later in pairwise(blocks))
    counts = {
        arm: sum(
            cell.count
            for block in blocks
            for key, cell in block.cells
            if key.metric is Metric.ERRORS and key.arm is arm and not key.tenant
        )
        for arm in (Arm.OLD, Arm.NEW)
    }
    assert sum(counts.values()) == 150
    assert counts[Arm.NEW] == pytest.approx(75, abs=30)
