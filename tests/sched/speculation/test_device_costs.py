from __future__ import annotations

import random

import pytest

from penstock.sched.speculation.device_costs import DeviceCosts
from penstock.sched.speculation.draft_budget import Outlook

SLOWDOWN = 1.2


def measured(batch: int, wait: float, deeper: float, row: float, *, depths: tuple[int, ...] = (1, 2, 4)) -> DeviceCosts:
    """A device whose step takes 4 ms and so much more, as shares of that, for waiting, for each draft in a row, and for
    a draft of everybody."""
    costs, dice = DeviceCosts(256), random.Random(0)
    for _ in range(3):
        costs.see(batch, [], 0.004, is_ahead=True)
    for number in range(60):
        depth = depths[number % len(depths)]
        counts = [dice.randint(1, depth) for _ in range(batch - 1)] + [depth]
        share = 1 + wait + deeper * depth + row * sum(counts) / batch
        costs.see(batch, counts, 0.004 * share * dice.uniform(0.98, 1.02), is_ahead=False)
    return costs


def test_it_is_told_what_a_step_takes_without_before_it_guesses_and_again_later() -> None:
    costs = DeviceCosts(256)
    assert costs.wants_plain(3)
    costs.see(3, [], 0.009, is_ahead=False)  # it waited for the step before
    assert costs.wants_plain(3)
    costs.see(3, [], 0.004, is_ahead=True)
    assert not costs.wants_plain(3)
    assert costs.wants_plain(2)
    assert not costs.knows_drafts(3)
    for _ in range(128):
        assert not costs.wants_plain(3)
        costs.see(3, [2], 0.005, is_ahead=False)
    assert costs.wants_plain(3)
    assert costs.knows_drafts(3)


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_what_was_measured_is_found(batch: int) -> None:
    wait, deeper, row = measured(batch, 0.12, 0.2, 0.04)._shares(batch)
    assert abs(wait + 4 * deeper + 4 * row - (0.12 + 0.8 + 0.16)) < 0.06
    assert abs(wait + deeper + row - 0.36) < 0.06


def test_the_likelier_the_more_and_where_it_does_not_pay_none() -> None:
    costs = measured(8, 0.1, 0.2, 0.03)
    most = [max(costs.allot([Outlook(chance, 6)] * 8, 8, SLOWDOWN)) for chance in (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)]
    assert most == sorted(most)
    assert most[0] == most[1] == 0
    assert most[-1] == 6


def test_one_who_waits_for_anothers_guesses_is_not_slowed_down_much() -> None:
    costs = measured(2, 0.3, 0.1, 0.02)
    assert costs.allot([Outlook(1.0, 6)], 2, SLOWDOWN) == [0]
    assert costs.allot([Outlook(1.0, 6)], 2, 3.0) == [6]
    assert max(costs.allot([Outlook(1.0, 6), Outlook(0.9, 6)], 2, SLOWDOWN)) == 6


def test_a_step_has_no_more_rows_than_were_captured() -> None:
    costs = DeviceCosts(16)
    costs.see(8, [], 0.004, is_ahead=True)
    assert sum(costs.allot([Outlook(1.0, 6)] * 8, 8, 9.0)) == 8
    assert costs.room(8) == 8
    assert costs.room(16) == costs.room(20) == 0


def test_what_took_far_too_long_is_hardly_believed() -> None:
    costs = measured(1, 0.1, 0.1, 0.0)
    costs.see(1, [4], 5.0, is_ahead=False)
    assert max(costs.allot([Outlook(0.95, 6)], 1, SLOWDOWN)) >= 4
