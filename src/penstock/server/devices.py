"""The devices that this replica runs on, as they were last read: for its metrics and its reports. A device with a fault
ends all new work here; what can go on elsewhere is given back at once."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from penstock.core.clock import Clock
from penstock.core.devices import DeviceReading
from penstock.observe import device_catalog as catalog
from penstock.observe.catalog import Metric
from penstock.observe.gpu.faults import DeviceFaults
from penstock.observe.registry import Registry

log = logging.getLogger("penstock.gpu")

_STALE_S = 10.0  # a driver that says nothing for so long has nothing to say of now

_GAUGES: dict[Metric, str] = {
    catalog.UTILISATION: "utilization",
    catalog.MEMORY_USED: "memory_used_bytes",
    catalog.MEMORY_TOTAL: "memory_total_bytes",
    catalog.POWER: "power_w",
    catalog.POWER_LIMIT: "power_limit_w",
    catalog.TEMPERATURE: "temperature_c",
}
_CLOCKS: dict[Metric, dict[str, str]] = {
    catalog.CLOCK: {"sm": "clock_hz", "memory": "memory_clock_hz"},
    catalog.CLOCK_MAX: {"sm": "clock_max_hz", "memory": "memory_clock_max_hz"},
}
_ECC = {"corrected": "ecc_corrected", "uncorrected": "ecc_uncorrected"}


class Devices:
    """Belongs to the event loop's thread."""

    def __init__(self, registry: Registry, clock: Clock, model: str, on_fault: Callable[[str], None]) -> None:
        self._registry = registry
        self._clock = clock
        self._model = model
        self._on_fault = on_fault
        self._faults = DeviceFaults()
        self._readings: tuple[DeviceReading, ...] = ()
        self._read_s = 0.0

    @property
    def readings(self) -> tuple[DeviceReading, ...]:
        return self._readings if self._clock.now() - self._read_s < _STALE_S else ()

    @property
    def fault(self) -> str:
        return "; ".join(f"{device}: {reason}" for device, reason in self._faults.found.items())

    def take(self, readings: list[DeviceReading]) -> None:
        self._readings = tuple(msgspec.structs.replace(reading, model=self._model) for reading in readings)
        self._read_s = self._clock.now()
        for reading in self._readings:
            for xid in reading.xids:
                log.error("the GPU %s reports Xid %d", reading.device, xid)
                self._registry.count(catalog.XID_ERRORS, reading.device, str(xid)).value += 1
            was_well = reading.device not in self._faults.found
            fault = self._faults.take(reading)
            if fault is not None and was_well:
                log.error("no more work for this replica: the GPU %s had a fault. %s", reading.device, fault)
                self._on_fault(f"the GPU of this replica had a fault. {fault}")

    def look(self) -> None:
        """Takes down how things stand."""
        replace, readings = self._registry.replace, self.readings
        found = self._faults.found
        replace(catalog.HEALTHY, {(r.device,): int(r.device not in found) for r in readings})
        replace(catalog.INFO, {(r.device, r.name, r.model): 1 for r in readings})
        replace(catalog.THROTTLED, {(r.device, reason): 1 for r in readings for reason in r.throttled})
        for metric, name in _GAUGES.items():
            replace(metric, {(r.device,): value for r in readings if (value := getattr(r, name)) is not None})
        for metric, names in (*_CLOCKS.items(), (catalog.ECC_ERRORS, _ECC)):
            replace(
                metric,
                {
                    (r.device, label): value
                    for r in readings
                    for label, name in names.items()
                    if (value := getattr(r, name)) is not None
                },
            )
