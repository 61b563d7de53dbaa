"""Blocks as gateways write them, from requests that a test makes up."""

from __future__ import annotations

from collections.abc import Iterable
from math import log
from random import Random

from penstock.core.rollout import BLOCK_S, Arm, Block, Cell, CellKey, Metric
from penstock.core.slo import Slo
from penstock.rollout.policy.decide import start
from penstock.rollout.policy.plan import RolloutPlan, plan_from
from penstock.rollout.policy.state import PoolSeen, RolloutState, Seen, targets

BEGAN = 1_700_000_000.0
READY = PoolSeen(ready=3)


def plan(**values: object) -> RolloutPlan:
    return plan_from(values, Slo())


def started(of: RolloutPlan | None = None) -> RolloutState:
    return start(
        "r1",
        model="m",
        old="v1",
        new="v2",
        plan=of or plan(),
        now=BEGAN,
        weights={"v1": 100.0, "v2": 0.0},
        shadow={"v1": 0.0, "v2": 0.0},
        by="anna",
    ).state


def seen_in_force(state: RolloutState, before: Seen | None = None) -> Seen:
    """All is ready, and what the state asks for is in force."""
    aim = targets(state)
    if aim.weights is None or aim.shadow is None:
        return before or Seen(READY, READY, {"v1": 100.0, "v2": 0.0}, {})
    return Seen(READY, READY, aim.weights, aim.shadow)


def block(at: float, values: Iterable[tuple[CellKey, Iterable[float]]], *, step: int = 0, gateway: str = "g1") -> Block:
    cells = []
    for key, several in values:
        cell = Cell()
        for value in several:
            cell.add(value, binned=bool(key.stratum) and not key.tenant)
        cells.append((key, cell))
    return Block("r1", step, gateway, at, BLOCK_S, cells)


def traffic(
    source: Random,
    windows: int,
    *,
    arms: tuple[Arm, Arm] = (Arm.OLD, Arm.NEW),
    requests: int = 20,
    tpot: float = 1.0,
    errors: float = 0.0,
    step: int = 0,
    first: int = 0,
    tenant: str = "",
    gateway: str = "g1",
) -> list[Block]:
    """Windows of requests, as many of each version; the new one's tokens take `tpot` times as long."""
    found = []
    for number in range(first, first + windows):
        drift = source.gauss(0.0, 0.3)  # of both
        values: list[tuple[CellKey, list[float]]] = []
        for arm, factor, failing in ((arms[0], 1.0, 0.0), (arms[1], tpot, errors)):
            times = [log(0.02 * factor) + drift + source.gauss(0.0, 0.15) for _ in range(requests)]
            failed = [float(source.random() < failing) for _ in range(requests)]
            values += [(CellKey(Metric.TPOT, arm, "f3"), times), (CellKey(Metric.ERRORS, arm), failed)]
            if tenant:
                values += [
                    (CellKey(Metric.TPOT, arm, "f3", tenant), times),
                    (CellKey(Metric.ERRORS, arm, "", tenant), failed),
                ]
        found.append(block(BEGAN + number * BLOCK_S, values, step=step, gateway=gateway))
    return found
