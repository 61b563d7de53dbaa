"""A replica and its GPUs, over the fake ones: what it exports, what it reports, and what ends its work."""

from collections.abc import Iterator

import pytest

from penstock.observe.gpu.fake import FakeGpus
from tests.server.relaying import asking
from tests.server.replica import NAME, Replica, serving
from tests.server.test_gateway_routes import COMPLETIONS, body
from tests.waiting import eventually


@pytest.fixture
def gpus() -> FakeGpus:
    return FakeGpus()


@pytest.fixture
def replica(gpus: FakeGpus) -> Iterator[Replica]:
    with serving(step_s=0.01) as found:
        found.app.devices.take(gpus.read())
        yield found


def test_devices_are_exported_and_reported_with_the_model_they_run(replica: Replica, gpus: FakeGpus) -> None:
    gpus.change("GPU-0", throttled=("hw_thermal",), ecc_corrected=7)
    gpus.raise_xid("GPU-1", 31, 31)
    replica.app.devices.take(gpus.read())
    metrics = replica.metrics()
    assert metrics["penstock_gpu_memory_used_bytes{GPU-0}"] == 1 << 30
    assert metrics["penstock_gpu_utilisation_ratio{GPU-1}"] == 0.5
    assert metrics["penstock_gpu_clock_hertz{GPU-0,sm}"] == 1.9e9
    assert metrics["penstock_gpu_throttled{GPU-0,hw_thermal}"] == 1
    assert metrics["penstock_gpu_ecc_errors_total{GPU-0,corrected}"] == 7
    assert metrics["penstock_gpu_xid_errors_total{GPU-1,31}"] == 2
    assert metrics[f"penstock_gpu_info{{GPU-0,{NAME},Fake GPU}}"] == 1
    assert metrics["penstock_gpu_healthy{GPU-1}"] == 1
    report = replica.call("GET", "/v1/penstock/snapshot")[2]
    assert [(one["device"], one["model"], one["number"], one["xids"]) for one in report["devices"]] == [
        ("GPU-0", NAME, 2, []),
        ("GPU-1", NAME, 2, [31, 31]),
    ]
    assert (report["device_fault"], report["is_draining"]) == ("", False)
    assert replica.call("GET", "/ready")[0] == 200


def test_a_fatal_error_ends_new_work_gives_streams_back_and_says_why(replica: Replica, gpus: FakeGpus) -> None:
    with asking((replica.host, replica.port), COMPLETIONS, body(max_tokens=1500)) as response:
        eventually(lambda: replica.engine.measured.load.num_running, lambda number: number == 1)
        gpus.raise_xid("GPU-0", 79)
        replica.app.devices.take(gpus.read())
        assert b": carry on: engine_unavailable" in response.read()
    status, _, answer = replica.post(COMPLETIONS, prompt="more")
    assert status == 503
    assert "Xid 79: it has fallen off the bus" in answer["error"]["message"]
    status, _, answer = replica.call("GET", "/ready")
    assert (status, answer["draining"]) == (503, True)
    assert "Xid 79" in answer["reason"]
    assert replica.call("GET", "/health")[0] == 200
    assert replica.metrics()["penstock_gpu_healthy{GPU-0}"] == 0
    assert replica.metrics()["penstock_gpu_healthy{GPU-1}"] == 1
    replica.app.devices.take(gpus.read())  # it looks well again, and is not
    report = replica.call("GET", "/v1/penstock/snapshot")[2]
    assert report["is_draining"]
    assert report["device_fault"].startswith("GPU-0: Xid 79")


def test_a_driver_that_falls_silent_leaves_no_old_figures(replica: Replica) -> None:
    devices = replica.app.devices
    devices._read_s -= 11
    assert devices.readings == ()
    assert not any(name.startswith("penstock_gpu_memory") for name in replica.metrics())
