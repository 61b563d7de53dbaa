"""Pool statuses of controllers, read from the store, as metrics and as the watch reads it.

An age is the time from when a status last changed until it was last read, by this gateway's clock: clocks of other
machines may be wrong, and while the store does not answer nobody is called silent for it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from penstock.observe import fleet_catalog as catalog
from penstock.observe.catalog import Metric
from penstock.observe.registry import Labels, Registry
from penstock.tenancy.fleet import PoolStatus
from penstock.watch.readings import PoolReading

_FAILURES = {"failed_start": "start", "lost": "lost"}  # other counts are actions


class PoolReader:
    """Belongs to the event loop."""

    def __init__(self, exports: list[Registry], clock: Callable[[], float] = time.time) -> None:
        """`exports`: its metrics are added when there is a fleet."""
        self._exports = exports
        self._registry = Registry(catalog.FLEET_CATALOG)
        self._clock = clock
        self._pools: Mapping[str, PoolStatus] = {}
        self._changed_at: dict[str, float] = {}
        self._read_at = 0.0

    def apply(self, found: Mapping[str, PoolStatus]) -> None:
        """Told by the one who reads the store, about once a second."""
        if found and self._registry not in self._exports:
            self._exports.append(self._registry)
        if found or self._pools:
            known, self._pools, self._read_at = self._pools, found, self._clock()
            self._changed_at = {pool: self._changed(known.get(pool), one) for pool, one in found.items()}
            self._take_down()

    def _changed(self, known: PoolStatus | None, found: PoolStatus) -> float:
        if known is None:  # it may have been there for long
            return min(found.at, self._read_at)
        return self._changed_at[found.pool] if known.at == found.at else self._read_at

    def readings(self) -> list[PoolReading]:
        return [
            PoolReading(
                model=one.pool,
                age_s=self._read_at - self._changed_at[one.pool],
                wanted=one.wanted,
                num_active=one.states.get("active", 0),
                bound=one.bound,
                arrivals_per_s=one.arrivals_per_s,
                start_p95_s=one.durations.get("start_s", 0.0),
                oldest_start_s=one.oldest_start_s,
                failed_starts=one.start_failures,
                failure=one.failure,
                reversals=one.reversals,
            )
            for one in self._pools.values()
        ]

    def _take_down(self) -> None:
        pools = self._pools.values()
        values: dict[Metric, dict[Labels, float]] = {
            catalog.REPLICAS: {(one.pool, state): n for one in pools for state, n in one.states.items()},
            catalog.WANTED: {(one.pool,): one.wanted for one in pools},
            catalog.LIMITS: {(one.pool, name): getattr(one, name) for one in pools for name in ("min", "max")},
            catalog.BOUND: {(one.pool, one.bound): 1 for one in pools if one.bound},
            catalog.DEMAND: {(one.pool,): one.arrivals_per_s for one in pools},
            catalog.FORECAST: {
                (one.pool, quantile): value
                for one in pools
                for quantile, value in (("0.5", one.forecast_p50), ("0.9", one.forecast_p90))
            },
            catalog.DECISIONS: {
                (one.pool, name): n for one in pools for name, n in one.counts.items() if name not in _FAILURES
            },
            catalog.FAILURES: {
                (one.pool, kind): one.counts.get(name, 0) for one in pools for name, kind in _FAILURES.items()
            },
            catalog.FAILED_STARTS: {(one.pool,): one.start_failures for one in pools},
            catalog.CHANGE_SECONDS: {
                (one.pool, name.removesuffix("_s")): s for one in pools for name, s in one.durations.items()
            },
            catalog.START_SECONDS: {(one.pool,): one.oldest_start_s for one in pools},
            catalog.REVERSALS: {(one.pool,): one.reversals for one in pools},
            **_of_shared_models(pools),
            catalog.COST: {(one.pool,): one.cost_per_hour for one in pools},
            catalog.STATUS_AGE: {(one.pool,): self._read_at - self._changed_at[one.pool] for one in pools},
        }
        for metric, found in values.items():
            self._registry.replace(metric, found)


def _of_shared_models(pools: Iterable[PoolStatus]) -> dict[Metric, dict[Labels, float]]:
    """Metrics of models that share a device with others."""
    models = [(one.pool, one.residency) for one in pools if one.residency is not None]
    held_bytes: Counter[str] = Counter()
    for _, model in models:
        held_bytes[model.device] += model.held_bytes
    totals = {model.device: model.device_bytes for _, model in models}
    return {
        catalog.MODEL_STATE: {(pool, model.state): 1 for pool, model in models},
        catalog.MODEL_MEMORY: {
            (pool, part): num_bytes
            for pool, model in models
            for part, num_bytes in (("held", model.held_bytes), ("kv", model.kv_bytes))
        },
        catalog.MODEL_PINNED: {(pool,): int(model.pinned) for pool, model in models},
        catalog.MODEL_WAITING: {(pool,): model.waiting for pool, model in models},
        catalog.MODEL_MOVES: {
            (pool, move): count
            for pool, model in models
            for move, count in (("load", model.loads), ("unload", model.unloads))
        },
        catalog.DEVICE_MEMORY: {
            (device, part): num_bytes
            for device, total_bytes in totals.items()
            for part, num_bytes in (("total", total_bytes), ("held", held_bytes[device]))
        },
    }
