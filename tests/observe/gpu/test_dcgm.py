from penstock.observe.gpu.dcgm import DcgmSource

# As dcgm-exporter 3.3 writes it.
LABELS = 'gpu="0",UUID="GPU-a1",pci_bus_id="00000000:3B:00.0",device="nvidia0",modelName="NVIDIA H200",Hostname="n1"'
OTHER = LABELS.replace("GPU-a1", "GPU-b2").replace('gpu="0"', 'gpu="1"')
TEXT = f"""# HELP DCGM_FI_DEV_SM_CLOCK SM clock frequency (in MHz).
# TYPE DCGM_FI_DEV_SM_CLOCK gauge
DCGM_FI_DEV_SM_CLOCK{{{LABELS}}} 1980
DCGM_FI_DEV_SM_CLOCK{{{OTHER}}} 345
DCGM_FI_DEV_GPU_TEMP{{{LABELS}}} 41
DCGM_FI_DEV_POWER_USAGE{{{LABELS}}} 312.5
DCGM_FI_DEV_GPU_UTIL{{{LABELS}}} 87
DCGM_FI_DEV_XID_ERRORS{{{LABELS},err_code="0",err_msg="No Error"}} %d
DCGM_FI_DEV_FB_FREE{{{LABELS}}} 1024
DCGM_FI_DEV_FB_USED{{{LABELS}}} 2048
DCGM_FI_DEV_CLOCK_THROTTLE_REASONS{{{LABELS}}} 68
DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{{{LABELS}}} 3
DCGM_FI_DEV_ROW_REMAP_FAILURE{{{LABELS}}} 0
"""


def source(*xids: int, uuids: tuple[str, ...] = ()) -> DcgmSource:
    texts = iter([TEXT % xid for xid in xids])
    return DcgmSource(lambda: next(texts), uuids)


def test_a_device_is_read_in_our_units() -> None:
    one, other = source(0).read()
    assert (one.device, one.name, one.utilization) == ("GPU-a1", "NVIDIA H200", 0.87)
    assert (one.memory_used_bytes, one.memory_total_bytes) == (2048 << 20, 3072 << 20)
    assert (one.clock_hz, one.power_w, one.temperature_c) == (1.98e9, 312.5, 41.0)
    assert one.throttled == ("power_cap", "hw_thermal")
    assert (one.ecc_corrected, one.ecc_uncorrected, one.has_bad_rows) == (None, 3, False)
    assert (other.device, other.clock_hz, other.utilization) == ("GPU-b2", 345e6, None)


def test_only_the_devices_that_are_ours_are_told() -> None:
    assert [one.device for one in source(0, uuids=("GPU-b2",)).read()] == ["GPU-b2"]


def test_an_error_is_told_when_it_comes_and_not_as_long_as_it_stands_there() -> None:
    devices = source(13, 13, 79, 79)
    assert [devices.read()[0].xids for _ in range(4)] == [(), (), (79,), ()]


def test_what_is_no_such_text_has_no_devices() -> None:
    assert DcgmSource(lambda: "<html>DCGM_FI_DEV_SM_CLOCK{} x</html>").read() == []
