"""Traffic of a model with two versions, as blocks of a gateway: a model of pools, not of requests' steps.

What makes a comparison hard is in it: requests of one session alike and stuck to one version, tenants of unequal size
with prompts of their own (conversations and code, after the means of Azure's public traces), load that moves both pools
together and each by itself from minute to minute, a day's curve, replicas that differ, few replicas in the new pool,
its cold cache at first, errors that come in bursts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.core.rollout import BIN, BLOCK_S, Arm, Block, Cell, CellKey, Metric
from penstock.core.rollout_strata import stratum
from penstock.rollout.policy.plan import RolloutStep

MINUTE_S = 60.0
_WINDOWS = round(MINUTE_S / BLOCK_S)
_EPOCH_S = 600.0  # a session's life
_EPOCHS = 64
_MAX_BUCKET = 21

_WITH_QUANTILES = (Metric.TTFT, Metric.TPOT, Metric.LATENCY)
_OF_TENANTS = (*_WITH_QUANTILES, Metric.ERRORS)  # that the default plan has gates of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Regression:
    """A fault of the new version."""

    name: str = "none"
    ttft: float = 1.0  # times as long
    tpot: float = 1.0
    errors: float = 0.0  # more of them, as a share
    answers: float = 0.0  # share of answers that are quite different ones
    output: float = 1.0  # times as many tokens
    tenant: int | None = None  # only this one's requests; 0 is the largest

    @property
    def is_none(self) -> bool:
        return self == Regression(self.name)


@dataclass(frozen=True)
class World:
    requests_per_s: float = 20.0
    sessions: int = 400  # at the same time
    tenants: int = 20
    named_tenants: int = 6  # with cells of their own
    replicas: int = 12  # of the model; a version has as many of them as its share asks for, and one at least
    cold_s: float = 180.0  # until a new pool's caches are two thirds warm
    in_flight: float = 6.0  # at a replica


@dataclass
class _Drift:
    """An autoregression over blocks: what goes on for a while."""

    source: np.random.Generator
    spread: float
    lasts_s: float
    value: float = 0.0

    def next(self) -> Floats:
        keep = float(np.exp(-BLOCK_S / self.lasts_s))
        steps = self.source.normal(0.0, self.spread * np.sqrt(1.0 - keep * keep), _WINDOWS)
        found = np.empty(_WINDOWS)
        for place, step in enumerate(steps):
            self.value = self.value * keep + step
            found[place] = self.value
        return found


@dataclass
class _Pool:
    load: _Drift  # of requests in flight
    speed: _Drift
    replicas: Floats  # each one's own logarithm of how slow it is
    sizing: float  # capacity is never exactly what is needed


@dataclass
class _Answers:
    """Requests of a minute that one arm ended, one entry each."""

    arm: Arm
    window: Ints
    tenant: Ints
    values: dict[Metric, tuple[Ints, Floats]] = field(default_factory=dict)  # rows, and their values
    in_flight: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    uncached: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    output: Ints = field(default_factory=lambda: np.empty(0, np.int64))


class Traffic:
    def __init__(self, seed: int, regression: Regression, world: World | None = None, rollout: str = "r") -> None:
        self._source = source = np.random.default_rng(seed)
        self._world = world = world or World()
        self._regression = regression
        self._rollout = rollout
        shape = (_EPOCHS, world.sessions)
        sizes = 1.0 / np.arange(1, world.tenants + 1)
        self._tenants = source.choice(world.tenants, size=shape, p=sizes / sizes.sum())
        self._lots = source.random(shape)
        self._asks = source.lognormal(0.0, 0.7, shape)  # how much a session asks
        is_code = source.random(world.tenants) < 0.3
        prompts = np.where(is_code, np.log(1500.0), np.log(800.0)) + source.normal(0.0, 0.3, world.tenants)
        outputs = np.where(is_code, np.log(28.0), np.log(150.0)) + source.normal(0.0, 0.3, world.tenants)
        self._prompts = prompts[self._tenants] + source.normal(0.0, 0.5, shape)
        self._outputs = outputs[self._tenants] + source.normal(0.0, 0.4, shape)
        self._phases = source.random(world.sessions) * _EPOCH_S
        self._demand = _Drift(source, 0.2, 90.0)
        self._day = source.random()
        self._pools = {name: self._pool(world.replicas) for name in ("old", "new", "copies")}
        self._new_replicas = world.replicas
        self._keys: dict[int, CellKey] = {}
        self._bursts = np.zeros(_WINDOWS)  # share of requests that fail, window by window
        self._served_s = 0.0  # how long clients have been at the new version

    def minute(self, at: float, number: int, step: RolloutStep) -> list[Block]:
        """Returns what a gateway measures in the minute from `at` on, in the step with this number."""
        share = step.share or step.shadow or 0.0
        wanted = max(1, round(self._world.replicas * share))
        if wanted != self._new_replicas:
            self._new_replicas, self._pools["new"] = wanted, self._pool(wanted)
        demand = self._demand.next()
        self._bursts = np.where(self._source.random(_WINDOWS) < 0.003, 0.03, 0.0005)  # what both versions share fails
        answers = self._copies(at, step, demand) if step.is_shadow else self._clients(at, share, demand)
        return _blocks(self._rollout, number, at, self._rows(answers), self._keys)

    def _pool(self, replicas: int) -> _Pool:
        few = np.sqrt(4.0 / replicas)
        source = self._source
        return _Pool(
            _Drift(source, 0.15 * few, 60.0),
            _Drift(source, 0.01 * few, 45.0),
            source.normal(0.0, 0.01, replicas),
            float(source.normal(0.0, 0.15)),
        )

    def _arrivals(self, at: float, demand: Floats, share: float) -> tuple[Ints, tuple[Ints, Ints]]:
        """Windows and sessions of the requests, as many as this share of all."""
        curve = 1.0 + 0.3 * np.sin(2 * np.pi * (at / 86400.0 + self._day))
        means = self._world.requests_per_s * BLOCK_S * curve * np.exp(demand) * share
        window = np.repeat(np.arange(_WINDOWS), self._source.poisson(means))
        epochs = ((at + self._phases) // _EPOCH_S).astype(np.int64) % _EPOCHS
        slots = np.arange(self._world.sessions)
        asks = self._asks[epochs, slots]
        slot = self._source.choice(self._world.sessions, size=len(window), p=asks / asks.sum())
        return window, (epochs[slot], slot)

    def _clients(self, at: float, share: float, demand: Floats) -> list[_Answers]:
        window, sessions = self._arrivals(at, demand, 1.0)
        is_new = self._lots[sessions] < share
        warm = 1.0 - np.exp(-self._served_s / self._world.cold_s)
        self._served_s += MINUTE_S
        found = []
        for arm, chosen, hits in ((Arm.OLD, ~is_new, 0.6), (Arm.NEW, is_new, 0.6 * warm)):
            mine = window[chosen], (sessions[0][chosen], sessions[1][chosen])
            is_hit = self._source.random(len(mine[0])) < hits
            prompts = self._prompt_tokens(mine[1])
            pool = self._pools["new" if arm is Arm.NEW else "old"]
            found.append(self._answered(arm, *mine, prompts, is_hit, pool, demand))
        return found

    def _copies(self, at: float, step: RolloutStep, demand: Floats) -> list[_Answers]:
        """The same requests for both, whose caches have the same."""
        window, sessions = self._arrivals(at, demand, step.shadow or 0.0)
        is_hit = self._source.random(len(window)) < 0.2
        prompts = self._prompt_tokens(sessions)
        old = self._answered(Arm.OLD_COPY, window, sessions, prompts, is_hit, self._pools["old"], demand)
        new = self._answered(Arm.NEW_COPY, window, sessions, prompts, is_hit, self._pools["new"], demand)
        for answers, changed in ((old, 0.0), (new, self._regression.answers)):
            differs = np.where(self._source.random(len(window)) < 0.4, self._source.beta(1.0, 9.0, len(window)), 0.0)
            differs = np.where(self._source.random(len(window)) < changed, 1.0, differs)
            answers.values[Metric.DISAGREEMENT] = np.arange(len(window)), differs
        return [old, new, _paired(old, new)]

    def _prompt_tokens(self, sessions: tuple[Ints, Ints]) -> Floats:
        noise = self._source.normal(0.0, 0.5, len(sessions[0]))
        return np.clip(np.exp(self._prompts[sessions] + noise), 8, 30_000)

    def _answered(
        self,
        arm: Arm,
        window: Ints,
        sessions: tuple[Ints, Ints],
        prompts: Floats,
        is_hit: NDArray[np.bool_],
        pool: _Pool,
        demand: Floats,
    ) -> _Answers:
        source, count = self._source, len(window)
        tenant = self._tenants[sessions]
        wrong = self._regression if arm in (Arm.NEW, Arm.NEW_COPY) else Regression()
        is_hurt = np.full(count, True) if wrong.tenant is None else tenant == wrong.tenant

        def times(factor: float) -> Floats:
            return np.where(is_hurt, factor, 1.0)

        load = demand + pool.load.next() + pool.sizing
        in_flight = source.poisson(self._world.in_flight * np.exp(load[window])).astype(np.int64)
        replica = pool.replicas[source.integers(0, len(pool.replicas), count)]
        slow = pool.speed.next()[window] + replica
        uncached = np.where(is_hit, prompts * 0.2, prompts).astype(np.int64)
        output = np.clip(
            np.exp(self._outputs[sessions] + source.normal(0.0, 0.7, count)) * times(wrong.output), 2, 4096
        )
        output = output.astype(np.int64)
        noise = source.normal(0.0, 1.0, count) * np.sqrt(0.12**2 + 0.25 / output)
        tpot = 0.02 * (1 + 0.04 * in_flight) * np.exp(slow + noise) * times(wrong.tpot)
        queue = source.exponential(0.002 * in_flight + 1e-6)
        ttft = (0.03 + 8e-5 * uncached * (1 + 0.03 * in_flight)) * np.exp(slow + source.normal(0.0, 0.25, count))
        ttft = (ttft + queue) * times(wrong.ttft)
        latency = ttft + tpot * (output - 1)
        device = (2e-5 * uncached + tpot * output / (1 + in_flight)) / output * np.exp(source.normal(0.0, 0.05, count))
        rows = np.arange(count)
        failed = source.random(count) < self._bursts[window] + np.where(is_hurt, wrong.errors, 0.0)
        refused = ~failed & (source.random(count) < 0.001)
        well = rows[~failed & ~refused]
        found = _Answers(arm, window, tenant, {}, in_flight, uncached, np.asarray(output, np.int64))
        for metric, value in (
            (Metric.TTFT, ttft),
            (Metric.TPOT, tpot),
            (Metric.LATENCY, latency),
            (Metric.OUTPUT_TOKENS, output.astype(float)),
            (Metric.DEVICE_TIME, device),
        ):
            found.values[metric] = well, np.log(value[well])
        found.values[Metric.ERRORS] = rows, failed.astype(float)
        found.values[Metric.REFUSALS] = rows, refused.astype(float)
        guided = well[source.random(len(well)) < 0.1]
        found.values[Metric.INVALID_GUIDED] = guided, (source.random(len(guided)) < 0.002).astype(float)
        if arm in (Arm.OLD, Arm.NEW):
            told = well[source.random(len(well)) < 0.03]
            found.values[Metric.COMPLAINTS] = told, (source.random(len(told)) < 0.08).astype(float)
        return found

    def _rows(self, answers: list[_Answers]) -> list[_Rows]:
        """Cells without stratum, which people look at, are left out where there are strata: no gate reads them."""
        found = []
        for of in answers:
            for metric, (rows, values) in of.values.items():
                strata = None if of.arm is Arm.PAIR else _strata(metric, of, rows)
                is_binned = strata is not None and metric in _WITH_QUANTILES
                found.append(_Rows(metric, of.arm, of.window[rows], strata, None, values, is_binned))
                if metric not in _OF_TENANTS:
                    continue
                named = of.tenant[rows] < self._world.named_tenants
                mine = None if strata is None else strata[named]
                tenants = of.tenant[rows][named]
                found.append(_Rows(metric, of.arm, of.window[rows][named], mine, tenants, values[named], False))
        return found


@dataclass(frozen=True)
class _Rows:
    """Values of one metric and arm, with what their cells' keys are made of."""

    metric: Metric
    arm: Arm
    window: Ints
    strata: Ints | None
    tenants: Ints | None
    values: Floats
    is_binned: bool


def _buckets(counts: Ints) -> Ints:
    """`core.rollout_strata.bucket` of each."""
    found: Ints = np.minimum(np.frexp(counts.astype(float))[1], _MAX_BUCKET - 1).astype(np.int64)
    return found


def _strata(metric: Metric, of: _Answers, rows: Ints) -> Ints | None:
    """A number that tells strata apart: all buckets that `stratum` may look at."""
    if not stratum(metric, uncached_tokens=0, in_flight=0, output_tokens=0):
        return None
    zero = np.zeros(len(rows), np.int64)
    prompt = _buckets(of.uncached[rows]) if _looks_at(metric, "uncached_tokens") else zero
    load = _buckets(of.in_flight[rows]) if _looks_at(metric, "in_flight") else zero
    output = _buckets(of.output[rows]) if _looks_at(metric, "output_tokens") else zero
    found: Ints = (prompt * _MAX_BUCKET + load) * _MAX_BUCKET + output
    return found


def _looks_at(metric: Metric, what: str) -> bool:
    none = {"uncached_tokens": 0, "in_flight": 0, "output_tokens": 0}
    return stratum(metric, **none) != stratum(metric, **none | {what: 1})


def _stratum_name(metric: Metric, number: int) -> str:
    prompt, rest = divmod(number, _MAX_BUCKET * _MAX_BUCKET)
    load, output = divmod(rest, _MAX_BUCKET)
    counts = [1 << bucket - 1 if bucket else 0 for bucket in (prompt, load, output)]
    return stratum(metric, uncached_tokens=counts[0], in_flight=counts[1], output_tokens=counts[2])


def _paired(old: _Answers, new: _Answers) -> _Answers:
    """Ratios of the same requests where conditions were alike."""
    pairs = _Answers(Arm.PAIR, old.window, old.tenant)
    same_load = _buckets(old.in_flight) == _buckets(new.in_flight)
    same_warmth = _buckets(old.uncached) == _buckets(new.uncached)
    count = len(old.window)
    for metric in (Metric.TTFT, Metric.TPOT, Metric.LATENCY, Metric.OUTPUT_TOKENS, Metric.DEVICE_TIME):
        ratio = np.full(count, np.nan)
        before = np.full(count, np.nan)
        before[old.values[metric][0]] = old.values[metric][1]
        ratio[new.values[metric][0]] = new.values[metric][1]
        ratio -= before
        fair = ~np.isnan(ratio)
        if metric is not Metric.OUTPUT_TOKENS:
            fair &= same_load
        if metric in (Metric.TTFT, Metric.DEVICE_TIME):
            fair &= same_warmth
        pairs.values[metric] = np.flatnonzero(fair), ratio[fair]
    return pairs


_METRICS, _ARMS = list(Metric), list(Arm)


def _blocks(rollout: str, step: int, at: float, rows: list[_Rows], keys: dict[int, CellKey]) -> list[Block]:
    cells: list[list[tuple[CellKey, Cell]]] = [[] for _ in range(_WINDOWS)]
    for of in rows:
        if not len(of.values):
            continue
        head = _METRICS.index(of.metric) * len(_ARMS) + _ARMS.index(of.arm)
        strata = np.full(len(of.values), -1) if of.strata is None else of.strata
        tenants = np.full(len(of.values), -1) if of.tenants is None else of.tenants
        place = ((strata + 1) * 64 + tenants + 1) * _WINDOWS + of.window
        places, inverse, counts = np.unique(place, return_inverse=True, return_counts=True)
        totals = np.bincount(inverse, of.values).tolist()
        squares = np.bincount(inverse, of.values * of.values).tolist()
        made = []
        for where, count, total, square in zip(places.tolist(), counts.tolist(), totals, squares, strict=True):
            rest, window = divmod(where, _WINDOWS)
            cell = Cell(count, total, square)
            cells[window].append((_key(keys, head, of, rest), cell))
            made.append(cell)
        if of.is_binned:
            bins = np.floor(of.values / BIN).astype(np.int64).tolist()
            for cell_place, bin_place in zip(inverse.tolist(), bins, strict=True):
                found = made[cell_place].bins
                found[bin_place] = found.get(bin_place, 0) + 1
    return [Block(rollout, step, "g", at + window * BLOCK_S, BLOCK_S, cells[window]) for window in range(_WINDOWS)]


def _key(keys: dict[int, CellKey], head: int, of: _Rows, place: int) -> CellKey:
    whole = place * (len(_METRICS) * len(_ARMS)) + head
    key = keys.get(whole)
    if key is None:
        strata, tenant = divmod(place, 64)
        name = _stratum_name(of.metric, strata - 1) if strata else ""
        key = keys[whole] = CellKey(of.metric, of.arm, name, f"tenant-{tenant - 1}" if tenant else "")
    return key
