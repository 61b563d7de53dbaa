from __future__ import annotations

import pytest

from penstock.core.replica import UNBOUNDED, ReplicaSnapshot, ReplicaState
from penstock.dialects import reading
from penstock.dialects.dialect import Dialect, Signal
from penstock.dialects.engines import DIALECTS
from penstock.dialects.engines.llamacpp import LLAMACPP, SLOTS
from penstock.dialects.engines.openai import OPENAI
from penstock.dialects.engines.sglang import SGLANG
from penstock.dialects.engines.tgi import TGI
from penstock.dialects.engines.triton import TRITON, TRITON_TRTLLM
from penstock.dialects.engines.trtllm import TRTLLM
from penstock.dialects.engines.vllm import VLLM
from tests.dialects import expositions


def taken(dialect: Dialect, body: bytes, number: int = 0) -> ReplicaSnapshot:
    document = dialect.loads[number]
    values = reading.read(document, body)
    assert reading.missing(document, values) == []
    return reading.snapshot(dialect, values, {}, id="r", url="http://r", model="m", taken_at=1.0)


def test_vllm_is_read_over_its_ranks() -> None:
    seen = taken(VLLM, expositions.VLLM)
    assert (seen.load.num_running, seen.load.num_waiting, seen.load.steps) == (5, 4, 100)
    assert seen.limits.kv_capacity_tokens == 32_000
    assert seen.load.kv_active_tokens == 16_000  # of the fuller rank: it is the one that will be short
    assert seen.load.queued_tokens == 4 * 200
    assert seen.prefill_tokens_per_s == 3000.0
    assert seen.decode_tokens_per_s == 20.0 * 5


def test_vllm_before_the_rename_reads_the_same() -> None:
    assert taken(VLLM, expositions.VLLM_OLD) == taken(VLLM, expositions.VLLM)
    by_reason = expositions.VLLM.replace(b"vllm:num_requests_waiting{", b"vllm:gone{")
    assert taken(VLLM, by_reason).load.num_waiting == 5


def test_a_vllm_that_sleeps_is_out() -> None:
    asleep = expositions.VLLM.replace(b'sleep_state="awake"} 1.0', b'sleep_state="awake"} 0.0')
    assert taken(VLLM, asleep).state is ReplicaState.OUT


def test_sglang_says_more_in_json_and_the_same_in_its_exposition() -> None:
    seen = taken(SGLANG, expositions.SGLANG_LOADS)
    assert (seen.load.num_running, seen.load.num_waiting, seen.load.queued_tokens) == (5, 1, 900)
    assert (seen.load.kv_active_tokens, seen.limits.kv_capacity_tokens) == (12_000, 40_000)
    assert (seen.max_sequences, seen.decode_tokens_per_s) == (96, 200.0)
    seen = taken(SGLANG, expositions.SGLANG, 1)
    assert (seen.load.num_running, seen.load.num_waiting) == (6, 7)  # those that wait for a grammar wait as well
    assert seen.load.kv_active_tokens == 35_000  # the pool that is fullest


def test_tensorrt_llm_and_its_ensemble_on_triton() -> None:
    seen = taken(TRTLLM, expositions.TRTLLM)
    assert (seen.load.num_running, seen.load.num_waiting) == (8, 7)
    assert (seen.load.kv_active_tokens, seen.limits.kv_capacity_tokens) == (1600, 3200)
    seen = taken(TRITON_TRTLLM, expositions.TRITON_TRTLLM)
    assert (seen.load.num_running, seen.load.num_waiting, seen.max_sequences) == (4, 1, 512)
    assert seen.limits.kv_capacity_tokens == 64 * 6239


def test_tgi_has_no_gauge_of_its_cache_and_the_batch_stands_for_it() -> None:
    seen = taken(TGI, expositions.TGI)
    assert (seen.load.num_running, seen.load.num_waiting, seen.load.steps) == (4, 11, 100)
    assert (seen.load.kv_active_tokens, seen.limits.kv_capacity_tokens) == (4096, 16_384)
    assert seen.load.queued_tokens == 1100


def test_llamacpp_has_metrics_or_at_least_slots() -> None:
    seen = taken(LLAMACPP, expositions.LLAMACPP)
    assert (seen.load.num_running, seen.load.num_waiting, seen.load.steps) == (4, 2, 108)
    assert seen.decode_tokens_per_s == 20.0 * 4
    values = reading.read(SLOTS, b'[{"id":0,"is_processing":true},{"id":1,"is_processing":false}]')
    assert values == {Signal.RUNNING: 1.0}


def test_a_document_that_does_not_say_how_busy_it_is_is_no_reading() -> None:
    document = VLLM.loads[0]
    renamed = expositions.VLLM.replace(b"vllm:num_requests_running", b"vllm:requests_running")
    assert reading.missing(document, reading.read(document, renamed)) == [Signal.RUNNING]
    assert reading.missing(document, reading.read(document, b"")) == [Signal.WAITING, Signal.RUNNING]
    loads = SGLANG.loads[0]
    for broken in (
        b"",
        b"[]",
        b"null",
        b'{"loads":[]}',
        b'{"loads":[{"num_running_reqs":"two"}]}',
        b"\xff",
        b"[" * 5000,
    ):
        assert Signal.RUNNING in reading.missing(loads, reading.read(loads, broken))


def test_an_old_snapshot_is_degraded_and_then_out_but_never_idle() -> None:
    seen = taken(VLLM, expositions.VLLM)
    assert seen.state_at(1.5) is ReplicaState.READY
    assert seen.state_at(3.0) is ReplicaState.DEGRADED
    assert seen.state_at(40.0) is ReplicaState.OUT


def test_who_cannot_say_how_busy_it_is_is_counted_by_what_was_sent() -> None:
    assert not OPENAI.has_load
    assert not TRITON.has_load  # what waits is known, what runs is not
    seen = reading.snapshot(TRITON, {}, {}, id="r", url="", model="m", taken_at=None)
    assert not seen.reports
    assert seen.max_sequences == UNBOUNDED
    assert seen.state_at(1e9) is ReplicaState.READY


def test_speed_is_that_of_lately_where_enough_has_happened() -> None:
    before = {Signal.PREFILL_TOKENS: 1000.0, Signal.PREFILL_SECONDS: 1.0}
    now = {Signal.PREFILL_TOKENS: 1500.0, Signal.PREFILL_SECONDS: 6.0}
    assert reading.prefill_rate(now, before) == 100.0
    assert reading.prefill_rate(now, {}) == 250.0
    assert reading.prefill_rate(before, before) == 1000.0
    assert reading.prefill_rate({}, {}) is None


def test_a_reading_of_a_minute_ago_is_kept_until_the_server_begins_anew() -> None:
    lately = reading.Lately(over_s=60.0)
    readings = [(float(at), {Signal.STEPS: float(at)}) for at in range(0, 300, 5)]
    assert lately.before(readings[0][1], 0.0) == {}
    for at, values in readings[1:]:
        before = lately.before(values, at)[Signal.STEPS]
        assert at - 80.0 <= before <= max(0.0, at - 60.0)
    assert lately.before({Signal.STEPS: 1.0}, 300.0) == {}


def test_without_a_counter_of_steps_work_that_moves_is_a_step() -> None:
    progress = reading.Progress()
    first = progress.steps({Signal.RUNNING: 1.0, Signal.KV_USED_TOKENS: 100.0})
    assert progress.steps({Signal.RUNNING: 1.0, Signal.KV_USED_TOKENS: 100.0, Signal.WAITING: 9.0}) == first
    assert progress.steps({Signal.RUNNING: 1.0, Signal.KV_USED_TOKENS: 101.0}) == first + 1


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_every_table_is_whole(dialect: Dialect) -> None:
    for document in (*dialect.loads, *dialect.facts):
        assert document.path.startswith(b"/")
        assert bool(document.series) != bool(document.members)
        for series in document.series.values():
            assert not set(series.names) & set(series.also)
    assert dialect.priority is None or dialect.priority.high in (-1, 1)
