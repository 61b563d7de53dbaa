"""View of the fleet for the watch, in its words: read from the replicas' last reports."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from penstock.admission.admission import Admission
from penstock.admission.settings import CLASS_NAMES
from penstock.core.devices import DeviceReading
from penstock.core.replica import ReplicaState
from penstock.gateway.replicas.replica import Replica
from penstock.gateway.replicas.replica_set import Subscriber
from penstock.observe.redaction import redact
from penstock.watch.readings import FleetReading, ReplicaReading

_USABLE = (ReplicaState.READY, ReplicaState.DEGRADED)


class FleetReader(Subscriber):
    def __init__(self, replicas: Mapping[str, Replica], admission: Admission) -> None:
        self._replicas = replicas
        self._admission = admission
        self.names: dict[str, str] = {}  # of replicas, as they may be shown
        self._devices: dict[tuple[str, str], DeviceReading] = {}

    def replica_added(self, replica: Replica) -> None:
        self.names[replica.id] = redact(replica.id)

    def replica_removed(self, replica: Replica) -> None:
        del self.names[replica.id]
        for key in [key for key in self._devices if key[0] == replica.id]:
            del self._devices[key]

    def listen(self) -> None:
        """Several times a second: a device's errors are in one report, and the next one has replaced it."""
        for replica in self._replicas.values():
            for device in replica.report.measured.device.devices if replica.report is not None else ():
                key, name = (replica.id, device.device), self.names[replica.id]
                last = self._devices.get(key)
                if last is None or last.number != device.number:
                    xids = (*(last.xids if last is not None else ()), *device.xids)
                    self._devices[key] = replace(device, replica=name, model=replica.model, xids=xids)

    def read(self, now: float) -> FleetReading:
        """How it stands, and the errors since the last time."""
        admission, replicas = self._admission, self._replicas.values()
        devices = list(self._devices.values())
        idle = {  # gone, or without work on purpose: of these, only the errors that they had are worth telling
            one.id for one in replicas if one.is_resting or one.snapshot.state_at(now) is ReplicaState.OUT
        }
        self._devices = {
            key: replace(one, xids=(), utilization=None if key[0] in idle else one.utilization)
            for key, one in self._devices.items()
        }
        waiting = {
            model: sum(admission.num_waiting(model, priority) for priority in CLASS_NAMES.values())
            for model in {replica.model for replica in replicas} | admission.waiting_models
        }
        readings = [self._reading(replica, now) for replica in replicas]
        return FleetReading(readings, waiting, devices, admission.managed(now))

    def _reading(self, replica: Replica, now: float) -> ReplicaReading:
        snapshot, report = replica.snapshot, replica.report
        state = snapshot.state_at(now)
        found = ReplicaReading(
            model=replica.model,
            replica=self.names[replica.id],
            is_usable=state in _USABLE and not snapshot.is_tripped,
            is_reachable=state is not ReplicaState.OUT or (report is not None and report.state != "ready"),
            is_draining=state is ReplicaState.DRAINING or replica.is_resting,
            is_resting=replica.is_resting,
        )
        if report is None:
            return found
        return replace(
            found,
            is_starting=replica.is_starting(now),
            is_draining=found.is_draining or report.is_draining,
            boot=report.boot,
            restarts=report.restarts,
            memory_kills=report.memory_kills,
            kv_fragmentation=round(report.measured.load.kv_fragmentation, 2),
            device_fault=report.measured.device.device_fault,
        )
