import pytest

from penstock.capacity.shapes import shape
from penstock.engine_process.facts import peaks_of, weight_bytes, work_of

CONFIG = shape("llama8b")


def test_a_device_that_was_measured_has_peaks() -> None:
    peaks = peaks_of("NVIDIA H200")
    assert peaks is not None
    assert peaks.bytes_per_s == pytest.approx(4.41e12)
    assert peaks_of("") is None


def test_weights_are_read_in_their_own_format() -> None:
    wide, small = weight_bytes(CONFIG, "bfloat16", "none"), weight_bytes(CONFIG, "bfloat16", "fp8")
    assert wide == pytest.approx(15.0e9, rel=0.01)
    assert small < 0.6 * wide
    assert weight_bytes(CONFIG, "some_dot", "none") == 0


def test_on_a_gpu_reading_context_weighs_more_than_on_a_cpu() -> None:
    gpu, cpu = (work_of(CONFIG, device, 131_072, None) for device in ("cuda", "cpu"))
    assert gpu.token == cpu.token == pytest.approx(14e9, rel=0.05)
    assert gpu.read > 10 * cpu.read
    assert work_of(CONFIG, "cuda", 131_072, peaks_of("NVIDIA H200")).read == pytest.approx(gpu.read, rel=0.01)
