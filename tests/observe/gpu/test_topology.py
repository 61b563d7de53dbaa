"""Against stand-ins for torch.cuda and NVIDIA's library: no test machine has several GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.core.devices import VisibleGpu, VisibleGpus
from penstock.observe.gpu.topology import read_gpus, visible_gpus

GIB = 1 << 30


class Cuda:
    """Three GPUs, the last of an older kind; `asked` are those whose memory torch itself was asked for."""

    def __init__(self, count: int = 3) -> None:
        self.count = count
        self.asked: list[int] = []

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def get_device_properties(self, device: int) -> Any:
        major, minor = (8, 0) if device == 2 else (9, 0)
        return SimpleNamespace(name=f"GPU {device}", total_memory=80 * GIB, uuid=f"u{device}", major=major, minor=minor)

    def mem_get_info(self, device: int) -> tuple[int, int]:
        self.asked.append(device)
        return 70 * GIB, 80 * GIB


class NVMLError(Exception):
    pass


class Nvml:
    """NVLink between the pairs in `joined`; whose memory is in `silent` it does not tell."""

    NVMLError = NVMLError
    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0

    def __init__(self, *joined: frozenset[str], silent: str = "", knows_links: bool = True) -> None:
        self.joined = joined
        self.silent = silent
        self.knows_links = knows_links

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> str:
        return uuid.decode()

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        if handle == self.silent:
            raise NVMLError
        return SimpleNamespace(free=60 * GIB)

    def nvmlDeviceGetP2PStatus(self, one: str, other: str, index: int) -> int:
        assert index == self.NVML_P2P_CAPS_INDEX_NVLINK
        if not self.knows_links:
            raise NVMLError
        return 0 if frozenset({one, other}) in self.joined else 5


def pair(one: int, other: int) -> frozenset[str]:
    return frozenset({f"GPU-u{one}", f"GPU-u{other}"})


ALL = (pair(0, 1), pair(0, 2), pair(1, 2))


def test_free_memory_is_the_drivers_and_torch_makes_no_context_for_it() -> None:
    cuda = Cuda()
    found = read_gpus(cuda, Nvml(*ALL))
    assert found.gpus[0] == VisibleGpu("GPU 0", 80 * GIB, 60 * GIB, has_fp8=True)
    assert [gpu.has_fp8 for gpu in found.gpus] == [True, True, False]
    assert cuda.asked == []


def test_torch_tells_free_memory_where_the_driver_does_not() -> None:
    cuda = Cuda()
    assert [gpu.free_bytes // GIB for gpu in read_gpus(cuda, Nvml(*ALL, silent="GPU-u1")).gpus] == [60, 70, 60]
    assert cuda.asked == [1]
    assert [gpu.free_bytes // GIB for gpu in read_gpus(cuda, None).gpus] == [70, 70, 70]


@pytest.mark.parametrize(
    ("nvml", "joined"),
    [
        (Nvml(*ALL), 3),
        (Nvml(pair(0, 1)), 2),
        (Nvml(pair(0, 2)), 1),
        (Nvml(pair(0, 1), pair(1, 2)), 2),
        (Nvml(), 1),
        (Nvml(knows_links=False), None),
        (None, None),
    ],
)
def test_the_first_gpus_that_are_all_joined_to_each_other_are_counted(nvml: Nvml | None, joined: int | None) -> None:
    assert read_gpus(Cuda(), nvml).num_nvlinked == joined


def test_a_machine_without_gpus_has_none() -> None:
    assert visible_gpus(Cuda(0)) == VisibleGpus()
