"""Observations added up in blocks of a few seconds, cell by cell. Pure: times come with the observations.

A cell without stratum has everything of its metric and arm; where a metric has strata, each has a cell as well. The
tenants with the most requests have cells of their own, in the same strata; the others are in the sums alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import floor, log

from penstock.core.rollout import BLOCK_S, Arm, Block, Cell, CellKey, Metric, RolloutOrder
from penstock.gateway.rollouts.observation import Observation

MAX_TENANTS = 32  # with cells of their own
_QUANTILES = frozenset({Metric.TTFT, Metric.TPOT, Metric.LATENCY})  # are asked for in each stratum
_OPERATORS = frozenset({Metric.DEVICE_TIME, Metric.COST})  # are no tenant's affair, and have the most strata
_MAX_COUNTED = 4096  # tenants whose requests are counted, to know the largest

_Cells = dict[CellKey, Cell]
_BlockKey = tuple[str, int, float]  # rollout, step, at


class LargestTenants:
    """The tenants with the most requests, as far as they are known when a block begins."""

    def __init__(self, most: int = MAX_TENANTS) -> None:
        self._most = most
        self._counts: Counter[str] = Counter()
        self._named: set[str] = set()

    def is_named(self, tenant: str) -> bool:
        """Counts a request of its."""
        self._counts[tenant] += 1
        if tenant not in self._named and len(self._named) < self._most:
            self._named.add(tenant)
        return tenant in self._named

    def choose_again(self) -> None:
        if len(self._counts) > _MAX_COUNTED:
            self._counts = Counter(dict(self._counts.most_common(_MAX_COUNTED // 2)))
        if len(self._counts) > self._most:
            self._named = {name for name, _ in self._counts.most_common(self._most)}


class BlockFolder:
    def __init__(self, gateway: str) -> None:
        self._gateway = gateway
        self._open: dict[_BlockKey, _Cells] = {}
        self._tenants: dict[str, LargestTenants] = {}  # by rollout
        self._corrections: dict[tuple[str, int, CellKey], tuple[float, float]] = {}  # by step; to total and squares
        self._closed_until = 0.0
        self._last_until = 0.0  # by the wall clock, at the last call of `close`
        self._set_back: tuple[float, float] | None = None  # both of these when the wall clock was set back

    def add(self, seen: Observation) -> None:
        cells, arm = self._cells(seen.order, seen.at), seen.arm
        tenant = seen.tenant if self._tenants_of(seen.order.id).is_named(seen.tenant) else ""
        for metric, value in seen.values:
            _add(cells, CellKey(metric, arm), value, binned=arm is Arm.PAIR)
            if tenant:
                _add(cells, CellKey(metric, arm, "", tenant), value)
        if (timing := seen.timing) is None:
            return
        for metric, seconds in timing.times():
            value, stratum = log(seconds), timing.stratum(metric)
            _add(cells, CellKey(metric, arm), value, binned=True)
            if stratum:
                _add(cells, CellKey(metric, arm, stratum), value, binned=metric in _QUANTILES)
            if tenant and metric not in _OPERATORS:
                _add(cells, CellKey(metric, arm, stratum, tenant), value)

    def correct(self, order: RolloutOrder, arm: Arm, metric: Metric, tenant: str, before: float, after: float) -> None:
        """A value that was counted in this step is another one now. It is put right in the step's next block that has
        such a cell: a cell that corrects and counts nothing would have no mean."""
        for key in (CellKey(metric, arm), CellKey(metric, arm, "", tenant)):
            total, squares = self._corrections.get((order.id, order.step, key), (0.0, 0.0))
            changed = total + after - before, squares + after * after - before * before
            self._corrections[order.id, order.step, key] = changed

    def close(self, now: float) -> list[Block]:
        """The blocks that ended by now. Where the wall clock was set back, blocks go on at half its pace until it has
        caught up: if they stood still, all that is seen meanwhile would wait in one of them; at its pace, they would
        always be ahead of other gateways'."""
        until = self._until(floor(now / BLOCK_S) * BLOCK_S)
        closed = [self._block(key, self._open.pop(key), BLOCK_S) for key in sorted(self._open) if key[2] < until]
        if closed:
            for tenants in self._tenants.values():
                tenants.choose_again()
        self._closed_until = max(self._closed_until, until)
        return closed

    def _until(self, until: float) -> float:
        """The end of the blocks that are closed. `until`: by the wall clock."""
        last, self._last_until = self._last_until, until
        if until >= self._closed_until:
            self._set_back = None
            return until
        if self._set_back is None or until < last:
            self._set_back = until, self._closed_until
        began, ahead = self._set_back
        return ahead + (until - began) // (2 * BLOCK_S) * BLOCK_S

    def close_all(self, now: float) -> list[Block]:
        """Those too that have not ended: nothing comes any more."""
        keys = sorted(self._open)
        return [self._block(key, self._open.pop(key), min(BLOCK_S, max(0.0, now - key[2]))) for key in keys]

    def keep(self, orders: Mapping[str, RolloutOrder]) -> None:
        """Forgets what it knows of all other rollouts and steps, but for blocks that are open."""
        steps = {(id, order.step) for id, order in orders.items()}
        self._tenants = {id: tenants for id, tenants in self._tenants.items() if id in orders}
        self._corrections = {key: change for key, change in self._corrections.items() if key[:2] in steps}

    def _cells(self, order: RolloutOrder, at: float) -> _Cells:
        """A block that was closed is not opened again, even by a wall clock that went back."""
        begins = max(floor(at / BLOCK_S) * BLOCK_S, self._closed_until)
        return self._open.setdefault((order.id, order.step, begins), {})

    def _tenants_of(self, rollout: str) -> LargestTenants:
        found = self._tenants.get(rollout)
        if found is None:
            found = self._tenants[rollout] = LargestTenants()
        return found

    def _block(self, key: _BlockKey, cells: _Cells, seconds: float) -> Block:
        rollout, step, at = key
        for cell_key, cell in cells.items():
            total, squares = self._corrections.pop((rollout, step, cell_key), (0.0, 0.0))
            cell.total += total
            cell.squares += squares
        return Block(rollout, step, self._gateway, at, seconds, list(cells.items()))


def _add(cells: _Cells, key: CellKey, value: float, *, binned: bool = False) -> None:
    cell = cells.get(key)
    if cell is None:
        cell = cells[key] = Cell()
    cell.add(value, binned=binned)


def merged(blocks: Iterable[Block]) -> list[Block]:
    """One block for all of the same rollout and step. It is where the last one was, so that it does not come too late
    to count, and as long as all the time that it covers."""
    found: dict[tuple[str, int], Block] = {}
    sums: dict[tuple[str, int], _Cells] = {}
    for block in blocks:
        key, cells = (block.rollout, block.step), dict[CellKey, Cell]()
        if key in found:
            cells, first = sums[key], found[key]
            at, seconds = max(first.at, block.at), first.seconds + block.seconds
            found[key] = Block(block.rollout, block.step, block.gateway, at, seconds, [])
        else:
            sums[key] = cells
            found[key] = Block(block.rollout, block.step, block.gateway, block.at, block.seconds, [])
        for cell_key, cell in block.cells:
            if (known := cells.get(cell_key)) is None:
                known = cells[cell_key] = Cell()
            known.merge(cell)
    for key, block in found.items():
        block.cells = list(sums[key].items())
    return list(found.values())
