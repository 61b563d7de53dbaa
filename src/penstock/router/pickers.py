"""Pickers: functions from totals to one index. Chance comes in as a draw in [0, 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.core.replica import ReplicaSnapshot

Picker = Callable[[Sequence[float], float], int]


def best(totals: Sequence[float], random01: float) -> int:
    """The highest; among equals the draw decides, so that equal replicas share."""
    highest = max(totals)
    if totals.count(highest) == 1:
        return totals.index(highest)
    equals = [index for index, total in enumerate(totals) if total == highest]
    return equals[int(random01 * len(equals))]


def power_of_two(totals: Sequence[float], random01: float) -> int:
    """The better of two drawn replicas: gateways that see the same stale numbers do not all pick the same one."""
    count = len(totals)
    if count < 2:
        return 0
    first, second = divmod(int(random01 * count * (count - 1)), count - 1)
    second += second >= first
    return first if totals[first] >= totals[second] else second


def least_worked(replicas: Sequence[ReplicaSnapshot], totals: Sequence[float], picked: int) -> int:
    """Returns, of the replicas that are as good as the picked one, the one with the fewest steps since its start; the
    picked one, if that is among them. Equals are mostly idle, and draws would leave some of them so for long."""
    total, found, least = totals[picked], picked, replicas[picked].load.steps
    for index, replica in enumerate(replicas):
        if replica.load.steps < least and totals[index] == total:
            found, least = index, replica.load.steps
    return found
