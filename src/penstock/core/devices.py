"""Readings of one device, such as a GPU, at one moment. Modules that read NVML say them in these words."""

from __future__ import annotations

from msgspec import Struct


class DeviceReading(Struct, frozen=True, kw_only=True):
    device: str  # its UUID, or host and number
    replica: str = ""  # the one that owns it
    model: str = ""
    utilization: float | None = None  # 0 to 1; None: it cannot be told
    xids: tuple[int, ...] = ()  # errors since the last reading

    number: int = 0  # readings are counted: two with one number are the same reading
    name: str = ""  # as its driver calls it
    is_lost: bool = False  # it no longer answers
    memory_used_bytes: int | None = None  # whoever uses it
    memory_total_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    clock_hz: float | None = None  # of its processors
    clock_max_hz: float | None = None
    memory_clock_hz: float | None = None
    memory_clock_max_hz: float | None = None
    throttled: tuple[str, ...] = ()  # what holds its clocks down: see `observe.gpu.throttling`
    ecc_corrected: int | None = None  # errors of its memory since its driver was loaded
    ecc_uncorrected: int | None = None
    has_bad_rows: bool = False  # memory that is broken and could not be replaced


class VisibleGpu(Struct, frozen=True):
    """One GPU that this process may use."""

    name: str  # as its driver calls it
    total_bytes: int
    free_bytes: int
    has_fp8: bool = True


class VisibleGpus(Struct, frozen=True):
    """GPUs of this node that this process may use, in the order in which ranks take them."""

    gpus: tuple[VisibleGpu, ...] = ()
    num_nvlinked: int | None = None  # the first so many are all joined by NVLink, others by PCIe; None: nobody knows
    num_nodes: int = 1  # that the replica has; the others are taken to have the same GPUs
