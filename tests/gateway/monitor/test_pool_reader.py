"""What controllers say of pools, as metrics and for the watch."""

from __future__ import annotations

from msgspec.structs import replace

from penstock.gateway.monitor.pool_reader import PoolReader
from penstock.observe.registry import Registry
from penstock.tenancy.fleet import ModelResidency, PoolStatus

STATUS = PoolStatus(
    "p",
    100.0,
    wanted=2,
    min=1,
    max=4,
    states={"active": 1, "starting": 1},
    bound="max",
    arrivals_per_s=3.5,
    forecast_p50=4.0,
    forecast_p90=6.0,
    cost_per_hour=7.2,
    durations={"start_s": 12.0, "wake_s": 0.8},
    oldest_start_s=5.0,
    start_failures=1,
    counts={"start": 3, "stop": 1, "failed_start": 2},
    reversals=1,
)


def test_metrics_are_exported_once_there_is_a_fleet() -> None:
    exports: list[Registry] = []
    reader = PoolReader(exports, lambda: 104.0)
    reader.apply({})
    assert exports == []
    reader.apply({"p": STATUS})
    reader.apply({"p": STATUS})
    (registry,) = exports
    lines = set(registry.exposition().decode().splitlines())
    assert {
        'penstock_fleet_replicas{pool="p",state="starting"} 1',
        'penstock_fleet_wanted_replicas{pool="p"} 2',
        'penstock_fleet_limit_replicas{pool="p",limit="max"} 4',
        'penstock_fleet_bound{pool="p",bound="max"} 1',
        'penstock_fleet_requests_per_second{pool="p"} 3.5',
        'penstock_fleet_forecast_requests_per_second{pool="p",quantile="0.9"} 6.0',
        'penstock_fleet_decisions_total{pool="p",action="start"} 3',
        'penstock_fleet_failures_total{pool="p",kind="start"} 2',
        'penstock_fleet_failures_total{pool="p",kind="lost"} 0',
        'penstock_fleet_change_seconds{pool="p",change="wake"} 0.8',
        'penstock_fleet_cost_per_hour{pool="p"} 7.2',
        'penstock_fleet_status_age_seconds{pool="p"} 4.0',
    } <= lines
    reader.apply({})
    assert b'pool="p"' not in registry.exposition()
    assert reader.readings() == []


def test_age_is_that_of_the_reading_so_that_a_silent_store_blames_no_controller() -> None:
    now = [104.0]
    reader = PoolReader([], lambda: now[0])
    reader.apply({"p": STATUS})
    now[0] = 1000.0
    (reading,) = reader.readings()
    assert (reading.age_s, reading.bound, reading.start_p95_s, reading.failed_starts) == (4.0, "max", 12.0, 1)


def test_clock_of_the_controllers_machine_may_be_wrong() -> None:
    now = [1000.0]
    reader = PoolReader([], lambda: now[0])
    for second in range(3):
        now[0] = 1000.0 + second
        reader.apply({"p": replace(STATUS, at=500.0 + second)})
    assert [one.age_s for one in reader.readings()] == [0.0]
    now[0] = 1042.0
    reader.apply({"p": replace(STATUS, at=502.0)})
    assert [one.age_s for one in reader.readings()] == [40.0]


def test_models_that_share_a_device_have_their_state_and_memory() -> None:
    loaded = ModelResidency("loaded", True, kv_bytes=30, held_bytes=70, device="H200", device_bytes=100, loads=2)
    waits = ModelResidency("unloaded", device="H200", device_bytes=100, waiting=3, unloads=1)
    exports: list[Registry] = []
    PoolReader(exports).apply({"p": replace(STATUS, residency=loaded), "b": replace(STATUS, pool="b", residency=waits)})
    lines = set(exports[0].exposition().decode().splitlines())
    assert {
        'penstock_fleet_model_state{pool="p",state="loaded"} 1',
        'penstock_fleet_model_state{pool="b",state="unloaded"} 1',
        'penstock_fleet_model_memory_bytes{pool="p",part="kv"} 30',
        'penstock_fleet_model_pinned{pool="p"} 1',
        'penstock_fleet_model_waiting_requests{pool="b"} 3',
        'penstock_fleet_model_moves_total{pool="p",move="load"} 2',
        'penstock_fleet_device_memory_bytes{device="H200",part="held"} 70',
        'penstock_fleet_device_memory_bytes{device="H200",part="total"} 100',
    } <= lines
