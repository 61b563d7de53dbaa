"""Signs of a fleet that cannot scale as it should: bounds, starts, flapping, and controllers that are gone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.core.slo import TIMED
from penstock.watch.alerts import Condition
from penstock.watch.kinds import AT_BOUND, CONTROLLER_DOWN, FLAPPING, MODEL_DOWN, START_SLOW, STARTS_FAILING
from penstock.watch.mishaps import explained
from penstock.watch.readings import PoolReading

_UPPER_BOUNDS = ("max", "spend", "quota")
_STALE_S = 30.0
_FORGOTTEN_S = 86400.0  # what nobody has managed for a day is managed no longer
_SLOW, _MIN_SLOW_S = 2.0, 60.0  # times the measured p95, and at least so long
_FAILED = 3  # starts in a row
_REVERSALS = 3  # in an hour


def scaling_conditions(pools: Iterable[PoolReading]) -> Iterator[Condition]:
    for pool in pools:
        if pool.age_s > _STALE_S:  # what else it says is old
            if pool.age_s < _FORGOTTEN_S:
                summary = f"{pool.model}: no controller has looked at this pool for {pool.age_s:.0f} s"
                yield Condition(kind=CONTROLLER_DOWN, summary=summary, value=pool.age_s, model=pool.model)
        else:
            yield from _managed(pool)


def _managed(pool: PoolReading) -> Iterator[Condition]:
    model = pool.model
    if pool.bound in _UPPER_BOUNDS:
        yield Condition(
            kind=AT_BOUND,
            summary=f"{model}: {pool.arrivals_per_s:.3g} requests/s need more than the {pool.wanted} replicas that "
            f"{pool.bound} allows",
            value=pool.arrivals_per_s,
            model=model,
            labels=(("bound", pool.bound),),
            explains=explained(model, TIMED),
        )
    if pool.oldest_start_s > max(_MIN_SLOW_S, _SLOW * pool.start_p95_s):
        summary = (
            f"{model}: a replica has been starting for {pool.oldest_start_s:.0f} s, usually {pool.start_p95_s:.0f} s"
        )
        yield Condition(kind=START_SLOW, summary=summary, value=pool.oldest_start_s, model=model)
    if pool.failed_starts >= _FAILED:
        summary = f"{model}: {pool.failed_starts} starts in a row failed: {pool.failure}"
        yield Condition(kind=STARTS_FAILING, summary=summary, value=float(pool.failed_starts), model=model)
        if pool.wanted and not pool.num_active:  # no gateway knows of a replica that could be down
            down = f"{model}: no replica can be used, and starts fail"
            yield Condition(kind=MODEL_DOWN, summary=down, value=0.0, model=model, explains=explained(model))
    if pool.reversals >= _REVERSALS:
        summary = f"{model}: {pool.reversals} steps up or down of the last hour were taken back within five minutes"
        yield Condition(kind=FLAPPING, summary=summary, value=float(pool.reversals), model=model)
