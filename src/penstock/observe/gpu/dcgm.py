"""GPUs as dcgm-exporter tells them, in its text for Prometheus: where NVML is out of reach, or knows less."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable, Collection

from penstock.core.devices import DeviceReading
from penstock.observe.gpu.throttling import reasons

_TIMEOUT_S = 2.0
_MAX_BYTES = 4 << 20
_SAMPLE = re.compile(r"^(DCGM_\w+)\{(.*)\} (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Fields = dict[str, float]


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
        return bytes(response.read(_MAX_BYTES)).decode(errors="replace")


class DcgmSource:
    """`uuids`: the devices that are wanted; none: all. `get` gets the text."""

    def __init__(self, get: Callable[[], str], uuids: Collection[str] = ()) -> None:
        self._get = get
        self._uuids = uuids
        self._last_xids: dict[str, int] = {}
        self._number = 0

    def close(self) -> None: ...

    def read(self) -> list[DeviceReading]:
        self._number += 1
        devices = parse(self._get())
        return [
            self._reading(uuid, name, fields)
            for (uuid, name), fields in devices.items()
            if not self._uuids or uuid in self._uuids
        ]

    def _reading(self, uuid: str, name: str, fields: Fields) -> DeviceReading:
        used, free = fields.get("FB_USED"), fields.get("FB_FREE")
        taken = (used or 0.0) + fields.get("FB_RESERVED", 0.0)
        return DeviceReading(
            device=uuid,
            number=self._number,
            name=name,
            xids=self._new_xids(uuid, int(fields.get("XID_ERRORS", 0))),
            utilization=_times(fields.get("GPU_UTIL"), 0.01),
            memory_used_bytes=int(used * 2**20) if used is not None else None,
            memory_total_bytes=int((taken + free) * 2**20) if used is not None and free is not None else None,
            power_w=fields.get("POWER_USAGE"),
            temperature_c=fields.get("GPU_TEMP"),
            clock_hz=_times(fields.get("SM_CLOCK"), 1e6),
            memory_clock_hz=_times(fields.get("MEM_CLOCK"), 1e6),
            throttled=reasons(int(fields.get("CLOCK_THROTTLE_REASONS", fields.get("CLOCKS_EVENT_REASONS", 0)))),
            ecc_corrected=_whole(fields.get("ECC_SBE_VOL_TOTAL")),
            ecc_uncorrected=_whole(fields.get("ECC_DBE_VOL_TOTAL")),
            has_bad_rows=fields.get("ROW_REMAP_FAILURE", 0.0) > 0,
        )

    def _new_xids(self, uuid: str, last: int) -> tuple[int, ...]:
        """Returns the new errors. Only the last one is told, and it stays there: what is there at first is old."""
        known = self._last_xids.get(uuid, last)
        self._last_xids[uuid] = last
        return (last,) if last != known and last > 0 else ()


def parse(text: str) -> dict[tuple[str, str], Fields]:
    """(UUID, name) -> its fields, by their names without `DCGM_FI_DEV_`."""
    found: dict[tuple[str, str], Fields] = {}
    for metric, labels, value in _SAMPLE.findall(text):
        named = dict(_LABEL.findall(labels))
        try:
            number = float(value)
        except ValueError:
            continue
        if uuid := named.get("UUID", named.get("uuid", "")):
            fields = found.setdefault((uuid, named.get("modelName", "")), {})
            fields[metric.removeprefix("DCGM_FI_DEV_")] = number
    return found


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
