"""GPUs that this process may use, and what joins them: from torch.cuda, which is handed in, and NVML where it is there.

NVML is asked for free memory first: torch would make a context on each GPU to ask, and leave it there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from penstock.core.devices import VisibleGpu, VisibleGpus

_FIRST_WITH_FP8 = (8, 9)  # compute capability: Ada, Hopper and what came after


class Cuda(Protocol):
    """The part of `torch.cuda` that is used here."""

    def is_available(self) -> bool: ...

    def device_count(self) -> int: ...

    def get_device_properties(self, device: int) -> Any: ...

    def mem_get_info(self, device: int) -> tuple[int, int]: ...


def visible_gpus(cuda: Cuda) -> VisibleGpus:
    """None of them where torch sees none."""
    if not cuda.is_available():
        return VisibleGpus()
    with _opened() as nvml:
        return read_gpus(cuda, nvml)


def read_gpus(cuda: Cuda, nvml: Any | None) -> VisibleGpus:
    """`nvml`: the library, initialized; None: there is none."""
    properties = [cuda.get_device_properties(index) for index in range(cuda.device_count())]
    handles = [_handle(nvml, f"GPU-{each.uuid}") for each in properties]
    gpus = []
    for index, (each, handle) in enumerate(zip(properties, handles, strict=True)):
        free_bytes = _free_bytes(nvml, handle)
        if free_bytes is None:
            free_bytes = cuda.mem_get_info(index)[0]
        has_fp8 = (each.major, each.minor) >= _FIRST_WITH_FP8
        gpus.append(VisibleGpu(each.name, int(each.total_memory), int(free_bytes), has_fp8))
    return VisibleGpus(tuple(gpus), _num_nvlinked(nvml, handles))


@contextmanager
def _opened() -> Iterator[Any]:
    """NVML for a while; None: it is not installed, or finds no driver."""
    try:
        import pynvml  # optional, and of no use without its library

        pynvml.nvmlInit()
    except Exception:  # its own error, which has no name where it is not installed
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _handle(nvml: Any | None, uuid: str) -> Any | None:
    if nvml is None:
        return None
    try:
        return nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
    except nvml.NVMLError:  # a part of a GPU (MIG) has no such name
        return None


def _free_bytes(nvml: Any | None, handle: Any | None) -> int | None:
    if nvml is None or handle is None:
        return None
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).free)
    except nvml.NVMLError:
        return None


def _num_nvlinked(nvml: Any | None, handles: list[Any | None]) -> int | None:
    """Returns how many of the first are joined to each other; None: the driver does not tell."""
    if nvml is None or any(handle is None for handle in handles):
        return None
    count = 1
    try:
        while count < len(handles) and all(_is_joined(nvml, handles[count], other) for other in handles[:count]):
            count += 1
    except nvml.NVMLError:
        return None
    return count


def _is_joined(nvml: Any, one: Any, other: Any) -> bool:
    status = nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    return bool(status == nvml.NVML_P2P_STATUS_OK)
