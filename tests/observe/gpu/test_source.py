import threading

from penstock.core.devices import DeviceReading
from penstock.observe.gpu.fake import FakeGpus
from penstock.observe.gpu.nvml import open_nvml
from penstock.observe.gpu.sampling import Sampling
from penstock.observe.gpu.source import Joined
from tests.waiting import GIVE_UP_S, eventually


class Broken:
    def read(self) -> list[DeviceReading]:
        raise OSError("connection refused")

    def close(self) -> None: ...


def test_what_one_source_cannot_tell_is_taken_from_the_next() -> None:
    first = FakeGpus(DeviceReading(device="GPU-0", name="H200", power_w=0.0, xids=(31,)))
    second = FakeGpus(
        DeviceReading(device="GPU-0", name="other", power_w=9.0, utilization=0.3, xids=(31, 48), has_bad_rows=True),
        DeviceReading(device="GPU-1"),
    )
    one, other = Joined([first, second]).read()
    assert (one.name, one.power_w, one.utilization, one.xids, one.has_bad_rows) == ("H200", 0.0, 0.3, (31, 48), True)
    assert other.device == "GPU-1"


def test_a_source_that_fails_leaves_the_others() -> None:
    joined = Joined([Broken(), FakeGpus()])
    assert [one.device for one in joined.read()] == ["GPU-0", "GPU-1"]
    assert len(joined.read()) == 2


def test_a_thread_reads_until_it_is_stopped_and_then_lets_go() -> None:
    gpus, taken, enough = FakeGpus(), list[list[DeviceReading]](), threading.Event()

    def take(readings: list[DeviceReading]) -> None:
        taken.append(readings)
        if len(taken) == 3:
            enough.set()

    sampling = Sampling(gpus, take, every_s=0.001)
    sampling.start()
    assert enough.wait(GIVE_UP_S)
    sampling.stop()
    eventually(lambda: gpus.is_closed)
    assert [readings[0].number for readings in taken[:3]] == [1, 2, 3]


def test_where_there_is_no_gpu_there_is_nothing_to_read() -> None:
    """On a machine that has one, this is the real thing."""
    nvml = open_nvml()
    if nvml is not None:
        assert all(reading.memory_total_bytes for reading in nvml.read())
        nvml.close()
