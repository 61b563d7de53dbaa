"""GPUs as NVIDIA's driver tells them, by NVML. Needs the package nvidia-ml-py; a machine without GPUs has no such
library, and then there is nothing to read."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from penstock.core.devices import DeviceReading
from penstock.observe.gpu.throttling import reasons

log = logging.getLogger("penstock.gpu")

_MAX_EVENTS = 64  # of one reading; a GPU that fails for good may report without end


def open_nvml(uuids: Sequence[str] = ()) -> NvmlSource | None:
    """Opens NVML for these devices, or for all that this process may see; None: there is no NVML here."""
    try:
        import pynvml  # optional, and of no use without its library
    except ImportError:
        log.warning("no GPU health: pip install 'penstock[gpu]' (nvidia-ml-py)")
        return None
    try:
        pynvml.nvmlInit()
        return NvmlSource(pynvml, uuids)
    except pynvml.NVMLError as error:
        log.warning("no GPU health: %s", error)
        return None


class NvmlSource:
    def __init__(self, nvml: Any, uuids: Sequence[str]) -> None:
        self._nvml = nvml
        self._handles = {uuid: nvml.nvmlDeviceGetHandleByUUID(uuid.encode()) for uuid in uuids}
        if not uuids:
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            self._handles = {_text(nvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}
        self._events = self._listen()
        self._number = 0

    def close(self) -> None:
        if self._events is not None:
            self._nvml.nvmlEventSetFree(self._events)
        self._nvml.nvmlShutdown()

    def read(self) -> list[DeviceReading]:
        self._number += 1
        xids = self._xids()
        return [self._reading(uuid, handle, tuple(xids.get(uuid, ()))) for uuid, handle in self._handles.items()]

    def _listen(self) -> Any:
        """Xids come as events; where none can be had, as in some virtual machines, the rest is still read."""
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
            for handle in self._handles.values():
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError as error:
            log.warning("the driver tells no Xid errors here: %s", error)
            return None
        return events

    def _xids(self) -> dict[str, list[int]]:
        """Returns the errors since the last call by device, without waiting for any."""
        nvml, found = self._nvml, dict[str, list[int]]()
        for _ in range(_MAX_EVENTS if self._events is not None else 0):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                uuid = _text(nvml.nvmlDeviceGetUUID(event.device))
            except nvml.NVMLError:  # a timeout: there is none
                break
            found.setdefault(uuid, []).append(int(event.eventData))
        return found

    def _reading(self, uuid: str, handle: Any, xids: tuple[int, ...]) -> DeviceReading:
        nvml = self._nvml
        lost: list[bool] = []

        def ask(name: str, *arguments: object) -> Any:
            """None: this device does not tell."""
            try:
                return getattr(nvml, name)(handle, *arguments)
            except nvml.NVMLError as error:
                if getattr(error, "value", None) in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                    lost.append(True)
                return None

        memory, use = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetUtilizationRates")
        rows = ask("nvmlDeviceGetRemappedRows")  # corrected, uncorrected, pending, failed
        volatile, sm, mem = nvml.NVML_VOLATILE_ECC, nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM
        return DeviceReading(
            device=uuid,
            number=self._number,
            name=_text(ask("nvmlDeviceGetName") or ""),
            xids=xids,
            utilization=use.gpu / 100 if use is not None else None,
            memory_used_bytes=int(memory.used) if memory is not None else None,
            memory_total_bytes=int(memory.total) if memory is not None else None,
            power_w=_times(ask("nvmlDeviceGetPowerUsage"), 1e-3),
            power_limit_w=_times(ask("nvmlDeviceGetEnforcedPowerLimit"), 1e-3),
            temperature_c=_times(ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU)),
            clock_hz=_times(ask("nvmlDeviceGetClockInfo", sm), 1e6),
            clock_max_hz=_times(ask("nvmlDeviceGetMaxClockInfo", sm), 1e6),
            memory_clock_hz=_times(ask("nvmlDeviceGetClockInfo", mem), 1e6),
            memory_clock_max_hz=_times(ask("nvmlDeviceGetMaxClockInfo", mem), 1e6),
            throttled=reasons(ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0),
            ecc_corrected=ask("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, volatile),
            ecc_uncorrected=ask("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, volatile),
            has_bad_rows=bool(rows[3]) if rows is not None else False,
            is_lost=bool(lost),
        )


def _times(value: float | None, factor: float = 1.0) -> float | None:
    return None if value is None else value * factor


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
