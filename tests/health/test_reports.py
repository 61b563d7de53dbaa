from penstock.api.replica_report import ReplicaReport
from penstock.core.measurements import DeviceReadings, EngineMeasurements, EngineSpeeds
from penstock.core.replica import KV_PULL_TOKENS_PER_S, ReplicaSnapshot
from penstock.health.reports import kv_address, snapshot_of


def test_the_kv_transfer_is_at_the_host_of_the_replicas_url() -> None:
    assert kv_address("http://10.0.0.5:9001", 7000) == "10.0.0.5:7000"
    assert kv_address("https://replica.pool.svc/", 7000) == "replica.pool.svc:7000"
    assert kv_address("http://[::1]:9001", 7000) == "[::1]:7000"
    assert kv_address("http://10.0.0.5:9001", 0) == ""
    assert kv_address("", 7000) == ""


def test_a_snapshot_has_the_role_and_the_kv_transfer_of_its_report() -> None:
    last = ReplicaSnapshot(id="r", url="http://10.0.0.5:9001", models=("m",))
    measured = EngineMeasurements(speeds=EngineSpeeds(kv_pull_tokens_per_s=50_000.0))
    report = ReplicaReport("b", "m", "ready", role="decode", kv_port=7000, kv_layout="l", measured=measured)
    seen = snapshot_of(report, last, 1.0)
    assert (seen.role, seen.kv_address, seen.kv_layout) == ("decode", "10.0.0.5:7000", "l")
    assert seen.kv_pull_tokens_per_s == 50_000.0
    plain = snapshot_of(ReplicaReport("b", "m", "ready"), last, 1.0)
    assert (plain.role, plain.kv_address, plain.kv_pull_tokens_per_s) == ("both", "", KV_PULL_TOKENS_PER_S)


def test_nobody_pulls_from_a_device_that_had_a_fault() -> None:
    measured = EngineMeasurements(device=DeviceReadings(device_fault="an XID"))
    report = ReplicaReport("b", "m", "ready", is_draining=True, kv_port=7000, kv_layout="l", measured=measured)
    assert snapshot_of(report, ReplicaSnapshot(id="r", url="http://h:1"), 1.0).kv_address == ""
