"""Evidence of a rollout: blocks of all gateways, folded into what the gates' tests need.

Blocks that cover the same seconds are added up, whatever the order in which they come. A window of time is closed when
a block is known that began `LATE_S` later, or when the runner says that it is so late; it is then folded into the
tests, and forgotten. Times in blocks that come later than that are left out. Counts, of which no window is kept, are
there at once and always: a version that fails every request is found before the first window is closed, and by a
gateway whose clock is behind, too. A block of a gateway whose clock is ahead is one of this moment, so that it closes
nobody's windows.

Times are compared window by window among requests of the same stratum, and windows of all steps go into one test:
shares that differ from step to step move no difference inside a window. Counts are kept step by step for the same
reason. Copies and clients' requests are never mixed.

To fold the store's blocks again gives the same evidence, as long as the clocks of gateways agree: a restart loses
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, exp, log1p

from penstock.core.rollout import BIN, BLOCK_S, Arm, Block, Cell, CellKey, Metric
from penstock.rollout.policy.plan import GateSettings, gate_metric
from penstock.rollout.policy.sequential import MeanDifference

LATE_S = 3 * BLOCK_S
STRATIFIED = frozenset({Metric.TTFT, Metric.TPOT, Metric.LATENCY, Metric.DEVICE_TIME, Metric.COST})
SCORES = {Metric.DISAGREEMENT: 1.0, Metric.JUDGED_WORSE: 1.0, Metric.DIVERGENCE: 0.01}  # and a first guess of squares
MEANS = STRATIFIED | {Metric.OUTPUT_TOKENS, *SCORES}  # compared window by window; all others are shares

_MIN_WEIGHT = 4.0  # of a window that is a test's observation: thinner ones are joined
_MAX_JOINED = 12  # windows: a minute, in which traffic is still alike
_MAX_TENANTS = 64  # the first ones: memory is bounded, whatever gateways write
_MIN_KNOWN = 20  # requests of the old version that a quantile is taken from
_OFFSETS = (-35, -14, -5, 0, 5, 9, 14, 20, 35)  # bins: ratios from 0.5 to 2

Subject = tuple[Metric, str]  # and a tenant; empty: all
Counts = tuple[float, int]  # sum, and of how many
_NEW = frozenset({Arm.NEW, Arm.NEW_COPY})


@dataclass
class _Arm:
    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, cell: Cell) -> None:
        self.count += cell.count
        self.total += cell.total
        self.squares += cell.squares

    @property
    def around(self) -> float:
        """Sum of squares around the mean."""
        return max(self.squares - self.total * self.total / self.count, 0.0)


@dataclass
class Comparison:
    """Means of one metric in two arms: differences among requests of the same stratum and the same seconds."""

    test: MeanDifference = field(default_factory=MeanDifference)
    old_count: int = 0
    new_count: int = 0
    _strata: dict[str, tuple[_Arm, _Arm]] = field(default_factory=dict)  # windows that are one observation together
    _windows: int = 0

    def add(self, stratum: str, cell: Cell, *, is_new: bool) -> None:
        """A cell of the window that is being closed."""
        arms = self._strata.get(stratum)
        if arms is None:
            arms = self._strata[stratum] = (_Arm(), _Arm())
        arms[is_new].add(cell)
        if is_new:
            self.new_count += cell.count
        else:
            self.old_count += cell.count

    def end_window(self) -> None:
        if not self._strata:
            return
        self._windows += 1
        both = [(old, new, old.count + new.count) for old, new in self._strata.values() if old.count and new.count]
        weight = sum(old.count * new.count / count for old, new, count in both)
        if weight < _MIN_WEIGHT and self._windows < _MAX_JOINED:
            return
        if weight > 0.0:
            total = squares = freedom = 0.0
            for old, new, count in both:
                total += (new.total / new.count - old.total / old.count) * old.count * new.count / count
                squares += old.around + new.around
                freedom += count - 2
            self.test.add(total / weight, weight, squares, freedom)
        self._strata, self._windows = {}, 0

    def add_pairs(self, cell: Cell) -> None:
        """The logarithms of ratios of one window: nothing is left to be compared."""
        around = max(cell.squares - cell.total * cell.total / cell.count, 0.0)
        self.test.add(cell.mean, float(cell.count), around, cell.count - 1.0)
        self.old_count += cell.count
        self.new_count += cell.count


@dataclass
class _Exceeding:
    """Requests of a window above their stratum's thresholds."""

    weight: float = 0.0
    old_count: float = 0.0
    new_count: float = 0.0
    windows: int = 0


@dataclass
class QuantileComparison:
    """A quantile of one metric in two arms, by how many requests exceed it.

    The threshold of a stratum is the old version's quantile in the windows before. If the new version's quantile is r
    times the old one's, as many of its requests exceed r times the threshold as of the old one's the threshold itself:
    the difference of both shares, window by window, is tested for each r of a grid. The ratios that are not excluded
    are the interval.
    """

    quantile: float
    offsets: tuple[int, ...] = _OFFSETS  # the grid, in bins
    tests: list[MeanDifference] = field(default_factory=list)
    old_count: int = 0
    new_count: int = 0
    old_bins: dict[int, int] = field(default_factory=dict)
    new_bins: dict[int, int] = field(default_factory=dict)
    _known: dict[str, dict[int, int]] = field(default_factory=dict)  # the old version's, by stratum
    _open: dict[str, tuple[dict[int, int], dict[int, int]]] = field(default_factory=dict)  # not folded yet
    _windows: int = 0

    def __post_init__(self) -> None:
        self.tests = [MeanDifference(prior_weight=100.0) for _ in self.offsets]

    def add(self, stratum: str, cell: Cell, *, is_new: bool) -> None:
        arms = self._open.get(stratum)
        if arms is None:
            arms = self._open[stratum] = ({}, {})
        _merge(arms[is_new], cell.bins)
        _merge(self.new_bins if is_new else self.old_bins, cell.bins)
        if is_new:
            self.new_count += cell.count
        else:
            self.old_count += cell.count

    def end_window(self) -> None:
        if not self._open:
            return
        self._windows += 1
        both = []
        for stratum, (old, new) in self._open.items():
            known = self._known.get(stratum)
            if old and new and known is not None and (threshold := _place(known, self.quantile)) is not None:
                both.append((old, new, threshold, sum(old.values()), sum(new.values())))
        weight = sum(olds * news / (olds + news) for *_, olds, news in both)
        if weight * (1.0 - self.quantile) < 1.0 and self._windows < _MAX_JOINED:
            return
        if weight > 0.0:
            spread = self.quantile * (1.0 - self.quantile)  # what the shares' variance is if the versions are equal
            above = [_above(old, threshold) / olds for old, _, threshold, olds, _ in both]
            for offset, test in zip(self.offsets, self.tests, strict=True):
                total = 0.0
                for (_, new, threshold, olds, news), of_old in zip(both, above, strict=True):
                    total += (_above(new, threshold + offset) / news - of_old) * olds * news / (olds + news)
                test.add(total / weight, weight, spread * weight, weight)
        for stratum, (old, _) in self._open.items():
            _merge(self._known.setdefault(stratum, {}), old)
        self._open, self._windows = {}, 0

    def ratio(self) -> float | None:
        """Ratio of the new version's quantile to the old one's, over all requests."""
        old, new = self.value(self.old_bins), self.value(self.new_bins)
        return new / old if old is not None and new is not None else None

    def value(self, bins: dict[int, int]) -> float | None:
        place = _place(bins, self.quantile)
        return None if place is None else exp((place + 0.5) * BIN)

    def is_beyond(self, offset: int, alpha: float) -> bool | None:
        """Whether the ratio is larger than the grid's; False: it is smaller; None: nobody knows."""
        interval = self.tests[self.offsets.index(offset)].interval(alpha)
        if interval is None or interval.low <= 0.0 <= interval.high:
            return None
        return interval.low > 0.0

    def bounds(self, alpha: float) -> tuple[float, float | None]:
        """Ratios of the grid between which the ratio is; 0 and None: there is no bound."""
        known = {offset: self.is_beyond(offset, alpha) for offset in self.offsets}
        low = max((offset for offset, beyond in known.items() if beyond is True), default=None)
        high = min((offset for offset, beyond in known.items() if beyond is False), default=None)
        return 0.0 if low is None else exp(low * BIN), None if high is None else exp(high * BIN)


def offset_of(margin: float) -> int:
    """The place in the grid of a ratio of 1 + margin."""
    return ceil(log1p(margin) / BIN)


def _merge(bins: dict[int, int], more: Mapping[int, int]) -> None:
    for place, count in more.items():
        bins[place] = bins.get(place, 0) + count


def _place(bins: dict[int, int], quantile: float) -> int | None:
    left = sum(bins.values())
    if left < _MIN_KNOWN:
        return None
    above = left * (1.0 - quantile)
    found = None
    for place in sorted(bins, reverse=True):
        found = place
        above -= bins[place]
        if above < 0:
            break
    return found


def _above(bins: Mapping[int, int], threshold: int) -> int:
    return sum(count for place, count in bins.items() if place > threshold)


@dataclass
class ArmsEvidence:
    """Clients' requests, or copies, of both versions; or pairs of copies."""

    means: dict[Subject, Comparison] = field(default_factory=dict)
    quantiles: dict[tuple[Metric, float], QuantileComparison] = field(default_factory=dict)

    def end_window(self) -> None:
        for mean in self.means.values():
            mean.end_window()
        for quantile in self.quantiles.values():
            quantile.end_window()


class Evidence:
    """All that gateways measured of one rollout, as far as its gates ask for it."""

    def __init__(self, rollout: str, gates: Mapping[str, GateSettings]) -> None:
        self.rollout = rollout
        self.late_blocks = 0
        self.clients, self.copies, self.pairs = ArmsEvidence(), ArmsEvidence(), ArmsEvidence()
        self._metrics = {Metric.ERRORS}  # it counts the requests
        self._tenants_metrics = {Metric.ERRORS}
        for name, gate in gates.items():
            metric, quantile = gate_metric(name)
            self._metrics.add(metric)
            if gate.tenants:
                self._tenants_metrics.add(metric)
            if quantile is not None:
                offsets = tuple(sorted({*_OFFSETS, offset_of(gate.margin)}))
                for arms in (self.clients, self.copies):
                    arms.quantiles[metric, quantile] = QuantileComparison(quantile, offsets)
        self._counts: dict[tuple[int, Metric, Arm, str], list[float]] = {}  # by step: sum and count
        self._tenants: set[str] = set()
        self._windows: dict[tuple[float, int], dict[str, list[tuple[CellKey, Cell]]]] = {}  # not closed yet; by gateway
        self._closed_until = float("-inf")

    def add(self, block: Block, now: float | None = None) -> None:
        """Blocks of other rollouts are none of its business. `now`: by the reader's clock, which no block is ahead of;
        None: blocks are as late as they say."""
        if block.rollout != self.rollout:
            return
        at = block.at
        if now is not None:  # what was closed by a clock that has stepped back since stays closed
            at = min(at, max(now // BLOCK_S * BLOCK_S, self._closed_until))
        is_late = at < self._closed_until
        self.late_blocks += is_late
        window = [] if is_late else self._windows.setdefault((at, block.step), {}).setdefault(block.gateway, [])
        for key, cell in block.cells:
            if cell.count <= 0 or not self._is_kept(key):
                continue
            if key.metric in MEANS:
                window.append((key, cell))
            else:
                sums = self._counts.setdefault((block.step, key.metric, key.arm, key.tenant), [0.0, 0])
                sums[0] += cell.total
                sums[1] += cell.count
        self.close(at)

    def close(self, now: float) -> None:
        """Fold the windows that began more than `LATE_S` ago, the oldest first: nothing more of them will come."""
        until = now - LATE_S
        if until <= self._closed_until:
            return
        for place in sorted(place for place in self._windows if place[0] < until):
            window = self._windows.pop(place)
            for gateway in sorted(window):
                self._fold(window[gateway])
            for arms in (self.clients, self.copies):
                arms.end_window()
        self._closed_until = until

    def counts(self, step: int, metric: Metric, arm: Arm, tenant: str = "") -> Counts:
        """Never more than all and never less than none, whatever gateways wrote."""
        total, count = self._counts.get((step, metric, arm, tenant), (0.0, 0))
        return min(max(total, 0.0), count), int(count)

    def new_requests(self, step: int, tenant: str = "") -> int:
        """Requests or copies that the new version ended in a step, well or not."""
        return sum(self.counts(step, Metric.ERRORS, arm, tenant)[1] for arm in (Arm.NEW, Arm.NEW_COPY))

    def largest_tenants(self, step: int, count: int) -> tuple[str, ...]:
        """Those of whom the new version ended most requests."""
        sizes = {tenant: self.new_requests(step, tenant) for tenant in self._tenants}
        return tuple(sorted((name for name in sizes if sizes[name]), key=lambda name: (-sizes[name], name))[:count])

    def _is_kept(self, key: CellKey) -> bool:
        metric, tenant = key.metric, key.tenant
        if metric in STRATIFIED and not key.stratum and key.arm is not Arm.PAIR:
            return False  # the same requests once more: their strata are what is compared
        if not tenant:
            return metric in self._metrics
        if metric not in self._tenants_metrics:
            return False
        if tenant in self._tenants:
            return True
        if len(self._tenants) == _MAX_TENANTS:
            return False
        self._tenants.add(tenant)
        return True

    def _fold(self, cells: list[tuple[CellKey, Cell]]) -> None:
        for key, cell in cells:
            metric = key.metric
            if key.arm is Arm.PAIR:
                if not key.stratum:
                    self.pairs.means.setdefault((metric, key.tenant), Comparison()).add_pairs(cell)
                continue
            arms = self.clients if key.arm in (Arm.OLD, Arm.NEW) else self.copies
            is_new = key.arm in _NEW
            subject = (metric, key.tenant)
            comparison = arms.means.get(subject)
            if comparison is None:
                test = MeanDifference(pseudo_squares=SCORES.get(metric, 0.0))
                comparison = arms.means[subject] = Comparison(test)
            comparison.add(key.stratum, cell, is_new=is_new)
            if not key.tenant and cell.bins:
                for (of, _), quantile in arms.quantiles.items():
                    if of is metric:
                        quantile.add(key.stratum, cell, is_new=is_new)
