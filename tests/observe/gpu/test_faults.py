import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.devices import DeviceReading
from penstock.observe.gpu.fake import FakeGpus
from penstock.observe.gpu.faults import FATAL_XIDS, DeviceFaults

CALM = DeviceReading(device="GPU-0", ecc_uncorrected=2)  # from before this process


def faults(*readings: DeviceReading) -> list[str | None]:
    found = DeviceFaults()
    return [found.take(reading) for reading in readings]


def changed(**fields: object) -> DeviceReading:
    gpus = FakeGpus(CALM)
    gpus.change("GPU-0", **fields)
    return gpus.read()[0]


def test_what_was_counted_before_is_not_held_against_a_device() -> None:
    assert faults(CALM, CALM) == [None, None]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ecc_uncorrected": 3}, "1 errors of its memory"),
        ({"xids": (31, 79)}, "Xid 79: it has fallen off the bus"),
        ({"has_bad_rows": True}, "could not be replaced"),
        ({"is_lost": True}, "no longer answers"),
    ],
)
def test_a_fault_has_a_reason_and_stays(fields: dict[str, object], words: str) -> None:
    before, during, after = faults(CALM, changed(**fields), CALM)
    assert before is None
    assert during is not None
    assert words in during
    assert after == during


@given(st.lists(st.integers(1, 200).filter(lambda xid: xid not in FATAL_XIDS)))
def test_errors_that_kill_a_process_are_no_fault_of_the_device(xids: list[int]) -> None:
    assert faults(CALM, changed(xids=tuple(xids))) == [None, None]


def test_one_device_does_not_answer_for_another() -> None:
    found, gpus = DeviceFaults(), FakeGpus()
    gpus.raise_xid("GPU-1", 48)
    assert [found.take(reading) is None for reading in gpus.read()] == [True, False]
