"""A report in JSON: one flat object, whose names are public and read by gateways of other versions."""

import json

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from penstock.api.replica_report import AdapterNews, ReplicaReport, decode, encode
from penstock.core.devices import DeviceReading
from penstock.core.measurements import (
    DeviceReadings,
    EngineLoad,
    EngineMeasurements,
    EngineSpeeds,
    PrefixCacheUse,
    ServingLimits,
)
from penstock.core.ranks import RankFigures

# Names that other versions and people's scripts read: none of them may go.
PUBLIC = {
    *("boot", "model", "state", "is_draining", "num_open", "num_waiting", "num_running", "queued_tokens", "steps"),
    *("kv_active_tokens", "kv_capacity_tokens", "restarts", "prefill_tokens_per_s", "decode_step_s", "max_open"),
    *("max_num_seqs", "chunk_tokens", "max_model_len", "block_size", "text", "generated_tokens", "prompt_tokens"),
    *("cached_tokens", "version", "busy_s", "devices", "device_fault", "kv_fragmentation", "memory_kills", "adapters"),
    *("host_tokens_per_s", "startup_s", "parallelism", "ranks"),
}

REPORT = ReplicaReport(
    "b",
    "m",
    "ready",
    is_draining=True,
    restarts=2,
    version="1.2",
    adapters=(AdapterNews("a", "d", is_on_device=True),),
    measured=EngineMeasurements(
        EngineLoad(num_open=3, num_running=1, queued_tokens=40),
        cache=PrefixCacheUse(prompt_tokens=100, cached_tokens=60),
        limits=ServingLimits(max_open=9, kv_capacity_tokens=1000),
        speeds=EngineSpeeds(1000.0, None, 4000.0),
        device=DeviceReadings(
            (DeviceReading(device="GPU-1", xids=(79,)),), "GPU-1: fell off the bus", "TP2", (RankFigures(1, mbu=0.5),)
        ),
    ),
)


def test_a_report_is_one_flat_object_with_its_public_names() -> None:
    written = json.loads(encode(REPORT))
    assert set(written) >= PUBLIC
    assert (written["num_open"], written["queued_tokens"], written["cached_tokens"]) == (3, 40, 60)
    assert (written["max_open"], written["kv_capacity_tokens"], written["host_tokens_per_s"]) == (9, 1000, 4000.0)
    assert (written["devices"][0]["device"], written["device_fault"]) == ("GPU-1", "GPU-1: fell off the bus")
    assert (written["parallelism"], written["ranks"][0]["mbu"]) == ("TP2", 0.5)
    assert decode(encode(REPORT)) == REPORT


@given(st.builds(ReplicaReport, startup_s=st.none() | st.dictionaries(st.text(), st.floats(0, 1e6))))
def test_what_is_written_is_read(report: ReplicaReport) -> None:
    assert decode(encode(report)) == report


def test_of_another_version_what_is_unknown_is_ignored_and_what_is_missing_has_its_default() -> None:
    read = decode(b'{"boot":"b","model":"m","state":"ready","num_running":4,"max_open":7,"of_tomorrow":[1]}')
    measured = EngineMeasurements(EngineLoad(num_running=4), limits=ServingLimits(max_open=7))
    assert read == ReplicaReport("b", "m", "ready", measured=measured)


@pytest.mark.parametrize("written", [b"", b"{}", b'{"boot":"b","model":"m","state":"ready","steps":"many"}'])
def test_what_is_no_report_is_refused(written: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(written)


def test_a_name_is_that_of_one_number() -> None:
    names = [name for group in EngineMeasurements().__struct_fields__ for name in _fields_of(group)]
    assert len(names + list(ReplicaReport.__struct_fields__)) == len({*names, *ReplicaReport.__struct_fields__})


def _fields_of(group: str) -> tuple[str, ...]:
    found: msgspec.Struct = getattr(EngineMeasurements(), group)
    return found.__struct_fields__
