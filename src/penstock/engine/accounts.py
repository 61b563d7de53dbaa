"""Costs of requests so far, by what the engine says of every step: seconds of the device, and block-seconds.

A `Meter` runs for a group of requests that somebody pays for together. The engine may still work for a request that has
ended, since steps are under way when it is told, so a request stays known here for a while.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from penstock.core.request import Cost, Request
from penstock.engine.messages import StepReport
from penstock.sched.cost import Work

_REMEMBERED = 4096  # requests that have ended; what is still under way for one comes within two steps


class Meter:
    __slots__ = ("_device_s", "_kv_block_s", "_late")

    def __init__(self) -> None:
        self._device_s = 0.0
        self._kv_block_s = 0.0
        self._late: Callable[[Cost], None] | None = None

    @property
    def cost(self) -> Cost:
        return Cost(self._device_s, self._kv_block_s)

    def add(self, device_s: float, kv_block_s: float) -> None:
        self._device_s += device_s
        self._kv_block_s += kv_block_s
        if self._late is not None:
            self._late(Cost(device_s, kv_block_s))

    def settle(self, late: Callable[[Cost], None]) -> Cost:
        """All of it so far; of what comes after this, `late` is told."""
        self._late = late
        return self.cost


class _Entry:
    __slots__ = ("context", "meter")

    def __init__(self, meter: Meter, context: int) -> None:
        self.meter = meter
        self.context = context  # tokens that its next decode sees


class Accounts:
    def __init__(self) -> None:
        self.begin(Work(), 1)

    def begin(self, work: Work, block_size: int) -> None:
        """A new process, that knows no request yet."""
        self._work = work
        self._block_size = block_size
        self._entries: dict[str, _Entry] = {}
        self._ended: deque[str] = deque()

    def open(self, request: Request, meter: Meter) -> None:
        self._entries[request.id] = _Entry(meter, len(request.prompt_ids) + len(request.output_ids))

    def close(self, request_id: str) -> None:
        self._ended.append(request_id)
        if len(self._ended) > _REMEMBERED:
            self._entries.pop(self._ended.popleft(), None)

    def take(self, report: StepReport) -> None:
        entries, price, step_s = self._entries, report.step.price, report.step.cost_s
        charged = {charge.request_id for charge in report.charges}
        for charge in report.charges:
            entry = entries.get(charge.request_id)
            if entry is not None:
                entry.meter.add(charge.device_s, charge.kv_block_s)
        decode, block_size = self._work.decode, self._block_size
        for event in report.events:
            entry = entries.get(event.request_id)
            if entry is None:
                continue
            if event.request_id not in charged:
                num_blocks = -(-entry.context // block_size)
                entry.meter.add(price * decode(entry.context), num_blocks * step_s)
            entry.context += len(event.token_ids)
