"""Mishaps happen at one moment and are then over: a process that dies, a device's error. Each is told for a while."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from penstock.core.devices import DeviceReading
from penstock.core.slo import Objective
from penstock.watch.alerts import About, Condition
from penstock.watch.kinds import CRASH, GPU_XID, OOM_KILL, POISON, AlertKind
from penstock.watch.readings import FleetReading, ReplicaReading

TOLD_FOR_S = 300.0
_GONE_S = 15.0  # a replica that nobody reaches for so long has not merely been slow


class Mishaps:
    def __init__(self) -> None:
        self._last: dict[str, ReplicaReading] = {}
        self._gone_since: dict[str, float] = {}
        self._open: dict[str, tuple[float, Condition]] = {}

    def conditions(self, fleet: FleetReading, now: float) -> list[Condition]:
        for device in fleet.devices:
            self._device(device, now)
        for reading in fleet.replicas:
            self._look(reading, now)
        self._open = {key: found for key, found in self._open.items() if now - found[0] < TOLD_FOR_S}
        return [condition for _, condition in self._open.values()]

    def quarantined(self, model: str, tenant: str, fingerprint: str, now: float) -> None:
        """One alert for each tenant, whatever it sends."""
        condition = Condition(
            kind=POISON,
            summary=f"{model}: request {fingerprint} of tenant {tenant} is refused: two replicas were lost with it",
            value=1.0,
            model=model,
            labels=(("tenant", tenant),),
        )
        self._open[condition.key] = now, condition

    def forget(self, replica: str) -> None:
        self._last.pop(replica, None)
        self._gone_since.pop(replica, None)

    def _look(self, reading: ReplicaReading, now: float) -> None:
        last, name = self._last.get(reading.replica), reading.replica
        if not reading.is_reachable:
            if reading.is_draining and last is not None:
                last = self._last[name] = replace(last, is_draining=True)
            since = self._gone_since.setdefault(name, now)
            if last is not None and last.boot and not last.is_draining and now - since >= _GONE_S:
                self._happened(CRASH, reading, "is out: it cannot be reached, or hangs", now)
            return
        self._gone_since.pop(name, None)
        self._last[name] = reading
        if reading.device_fault and not self._is_told(GPU_XID, name):
            self._happened(GPU_XID, reading, f"gets no more work: {reading.device_fault}", now)
        if last is None or not last.boot:
            return
        is_new = reading.boot != last.boot
        if reading.memory_kills > (0 if is_new else last.memory_kills):
            self._happened(OOM_KILL, reading, "was killed for its memory", now)
        elif is_new and not last.is_draining:
            self._happened(CRASH, reading, "started anew without having been told to stop", now)
        elif not is_new and reading.restarts > last.restarts:
            self._happened(CRASH, reading, f"has started its engine again, {reading.restarts} times by now", now)

    def _is_told(self, kind: AlertKind, replica: str) -> bool:
        return any(one.kind is kind and one.replica == replica for _, one in self._open.values())

    def _happened(self, kind: AlertKind, reading: ReplicaReading, what: str, now: float) -> None:
        condition = Condition(
            kind=kind,
            summary=f"{reading.model}: {reading.replica} {what}",
            value=1.0,
            model=reading.model,
            replica=reading.replica,
            explains=explained(reading.model),
        )
        self._open[condition.key] = now, condition

    def _device(self, device: DeviceReading, now: float) -> None:
        for xid in device.xids:
            condition = Condition(
                kind=GPU_XID,
                summary=f"{device.device} reported Xid {xid}",
                value=float(xid),
                model=device.model,
                replica=device.replica,
                labels=(("device", device.device), ("xid", str(xid))),
                explains=explained(device.model),
            )
            self._open[condition.key] = now, condition


ANOMALIES = "anomalies"


def explained(model: str, objectives: Iterable[str] = tuple(Objective)) -> frozenset[About]:
    """Returns what else of a model may go wrong for the same reason."""
    return frozenset((model, name) for name in (*objectives, ANOMALIES))
