"""Signs of what goes wrong slowly: queues, devices that idle or are full, KV caches that fill with nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set
from statistics import median

from penstock.core.devices import DeviceReading
from penstock.core.slo import TIMED
from penstock.watch.alerts import Condition
from penstock.watch.kinds import FRAGMENTED, GPU_FULL, GPU_IDLE, MODEL_DOWN, QUEUE
from penstock.watch.mishaps import explained
from penstock.watch.readings import FleetReading, ReplicaReading

_IDLE, _FULL = 0.30, 0.95
_LULL_S = 5.0  # a queue that was empty for less has not been empty
_HOUR = 60  # samples
_ENDS = 10  # samples at each end of the hour that are compared
_RISEN, _MUCH = 0.10, 0.30  # of the KV cache
_STARTING_S = 120.0  # a model that nobody loads by then is not starting
_SMOOTH = 0.05  # what the newest reading of a device counts: a second of idleness is none


class FleetSigns:
    def __init__(self, now: float) -> None:
        self._began_at = now
        self._waited_at: dict[str, float] = {}
        self._utilization: dict[tuple[str, str], float] = {}  # by replica and device
        self._fragmented: dict[str, deque[float]] = {}

    def conditions(self, fleet: FleetReading, has_been_up: Set[str], now: float) -> list[Condition]:
        """`has_been_up`: models that could be used at some time."""
        found = [*self._queues(fleet.waiting, now), *self._down(fleet.replicas, has_been_up, now)]
        for device in fleet.devices:
            found += self._device(device)
        for reading in fleet.replicas:
            found += self._fragmentation(reading)
        return found

    def forget(self, replica: str) -> None:
        self._fragmented.pop(replica, None)
        for key in [key for key in self._utilization if key[0] == replica]:
            del self._utilization[key]

    def sample(self, fleet: FleetReading) -> None:
        """Notes the fragmentation of the KV caches, once a minute."""
        for reading in fleet.replicas:
            if reading.kv_fragmentation is not None:
                self._fragmented.setdefault(reading.replica, deque(maxlen=_HOUR)).append(reading.kv_fragmentation)

    def _queues(self, waiting: Mapping[str, int], now: float) -> list[Condition]:
        found = []
        for model, count in waiting.items():
            if count:
                self._waited_at[model] = now
            if now - self._waited_at.get(model, -_LULL_S) < _LULL_S:
                found.append(
                    Condition(
                        kind=QUEUE,
                        summary=f"{model}: requests wait at the gateway, {count} now",
                        value=float(count),
                        model=model,
                        explains=explained(model, TIMED),
                    )
                )
        return found

    def _device(self, device: DeviceReading) -> list[Condition]:
        if device.utilization is None:
            return []
        key = device.replica, device.device
        last = self._utilization.get(key, device.utilization)
        level = self._utilization[key] = last + _SMOOTH * (device.utilization - last)
        kind = GPU_IDLE if level < _IDLE else GPU_FULL if level > _FULL else None
        if kind is None:
            return []
        summary = f"{device.device} is used to {level:.0%}"
        labels = (("device", device.device),)
        return [
            Condition(
                kind=kind, summary=summary, value=level, model=device.model, replica=device.replica, labels=labels
            )
        ]

    def _fragmentation(self, reading: ReplicaReading) -> list[Condition]:
        past = self._fragmented.get(reading.replica)
        if past is None or len(past) < _HOUR:
            return []
        samples = list(past)
        before, now = median(samples[:_ENDS]), median(samples[-_ENDS:])
        if now < _MUCH or now - before < _RISEN:
            return []
        summary = f"{reading.model}: {reading.replica} holds {now:.0%} of its KV cache for nothing, {before:.0%} before"
        return [Condition(kind=FRAGMENTED, summary=summary, value=now, model=reading.model, replica=reading.replica)]

    def _down(self, replicas: Sequence[ReplicaReading], has_been_up: Set[str], now: float) -> list[Condition]:
        """A model that has never been up is starting: as long as a replica loads it, and for a while without one. One
        whose replicas are all without traffic on purpose is not down."""
        is_young = now - self._began_at < _STARTING_S
        starting = {one.model for one in replicas if is_young or one.is_starting} - has_been_up
        usable = {one.model for one in replicas if one.is_usable}
        return [
            Condition(
                kind=MODEL_DOWN,
                summary=f"{model}: no replica can be used",
                value=0.0,
                model=model,
                explains=explained(model),
            )
            for model in sorted({one.model for one in replicas if not one.is_resting} - starting - usable)
        ]
