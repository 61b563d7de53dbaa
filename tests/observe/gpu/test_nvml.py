"""Against a stand-in for NVIDIA's library, which no test machine has. What the real one says was seen on an H200."""

from types import SimpleNamespace
from typing import Any

from penstock.observe.gpu.nvml import NvmlSource


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        self.value = value


class StandIn:
    """Two devices, as far as a reading asks for them. What is in `missing` this GPU does not tell."""

    NVMLError = NVMLError
    NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED, NOT_SUPPORTED, TIMEOUT = 15, 16, 3, 10
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_VOLATILE_ECC, NVML_TEMPERATURE_GPU = 1, 2, 0, 0
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, *missing: str, lost: bool = False) -> None:
        self.missing = missing
        self.lost = lost
        self.pending: list[tuple[str, int]] = []
        self.is_shut = False
        self._facts: dict[str, Any] = {
            "Name": "NVIDIA H200",
            "MemoryInfo": SimpleNamespace(used=3 << 30, total=140 << 30),
            "UtilizationRates": SimpleNamespace(gpu=87),
            "RemappedRows": (0, 1, True, False),
            "PowerUsage": 312_500,
            "EnforcedPowerLimit": 700_000,
            "Temperature": 41,
            "CurrentClocksThrottleReasons": 0b1000101,
        }

    def __getattr__(self, name: str) -> Any:
        fact = name.removeprefix("nvmlDeviceGet")

        def ask(handle: str, *arguments: int) -> Any:
            if self.lost:
                raise NVMLError(self.NVML_ERROR_GPU_IS_LOST)
            if fact in self.missing:
                raise NVMLError(self.NOT_SUPPORTED)
            match fact, arguments:
                case "UUID", _:
                    return handle
                case "ClockInfo" | "MaxClockInfo", (domain,):
                    return 1000 * domain
                case "TotalEccErrors", (kind, _):
                    return 5 if kind == self.NVML_MEMORY_ERROR_TYPE_CORRECTED else 0
            return self._facts[fact]

        return ask

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"GPU-{index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> str:
        return uuid.decode()

    def nvmlEventSetCreate(self) -> str:
        if "events" in self.missing:
            raise NVMLError(self.NOT_SUPPORTED)
        return "set"

    def nvmlDeviceRegisterEvents(self, handle: str, kinds: int, events: str) -> None: ...

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> object:
        if not self.pending:
            raise NVMLError(self.TIMEOUT)
        device, xid = self.pending.pop(0)
        return SimpleNamespace(device=device, eventData=xid)

    def nvmlEventSetFree(self, events: str) -> None: ...

    def nvmlShutdown(self) -> None:
        self.is_shut = True


def test_a_device_is_read_in_our_units() -> None:
    nvml = StandIn()
    (one,) = NvmlSource(nvml, ["GPU-1"]).read()
    assert (one.device, one.name, one.number, one.utilization) == ("GPU-1", "NVIDIA H200", 1, 0.87)
    assert (one.power_w, one.power_limit_w, one.temperature_c) == (312.5, 700.0, 41.0)
    assert (one.clock_hz, one.clock_max_hz, one.memory_clock_hz) == (1e9, 1e9, 2e9)
    assert one.throttled == ("power_cap", "hw_thermal"), "an idle GPU is not held down"
    assert (one.ecc_corrected, one.ecc_uncorrected, one.has_bad_rows) == (5, 0, False)


def test_errors_are_told_once_and_of_the_device_they_happened_on() -> None:
    nvml = StandIn()
    source = NvmlSource(nvml, [])
    nvml.pending = [("GPU-1", 31), ("GPU-0", 79), ("GPU-1", 43)]
    assert [one.xids for one in source.read()] == [(79,), (31, 43)]
    assert [one.xids for one in source.read()] == [(), ()]
    source.close()
    assert nvml.is_shut


def test_what_a_device_does_not_tell_is_none_and_the_rest_is_read() -> None:
    one, _ = NvmlSource(StandIn("events", "TotalEccErrors", "RemappedRows", "UtilizationRates"), []).read()
    assert (one.ecc_uncorrected, one.utilization, one.has_bad_rows, one.is_lost) == (None, None, False, False)
    assert one.power_w == 312.5


def test_a_device_that_is_gone_is_lost() -> None:
    nvml = StandIn()
    source = NvmlSource(nvml, ["GPU-0"])
    nvml.lost = True
    assert source.read()[0].is_lost
