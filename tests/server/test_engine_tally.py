import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.core.expert_load import ExpertLoad, LayerLoad
from penstock.core.measurements import EngineLoad, EngineMeasurements, EngineTotals, KvTransferTotals, ServingLimits
from penstock.core.ranks import RankFigures, RankReading, RankUsage
from penstock.engine.messages import EngineInfo, StepFigures, StepReport
from penstock.observe.catalog import CATALOG
from penstock.observe.device_catalog import DEVICE_CATALOG
from penstock.observe.registry import Registry
from penstock.server.engine_tally import EngineTally, RankNews

INFO = EngineInfo(
    device="cuda",
    number_format="bfloat16",
    quant="none",
    kv_dtype="bfloat16",
    kernels="triton",
    limits=ServingLimits(max_num_seqs=4, chunk_tokens=64, max_model_len=160, block_size=16, kv_capacity_tokens=160),
    kv_bytes=0,
    weight_bytes=1000,
    kv_token_bytes=10,
    read_bytes_per_s=1e6,
    device_name="Fake GPU",
)


def step(number: int, preemptions: int = 0) -> StepReport:
    totals = EngineTotals(busy_s=0.002 * number, read_tokens=50 * number, preemptions=preemptions)
    load = EngineLoad(steps=number, kv_active_tokens=40)
    return StepReport([], EngineMeasurements(load, totals), StepFigures(cost_s=0.002))


def seen(tally: EngineTally, registry: Registry, info: EngineInfo | None = INFO) -> dict[str, float]:
    tally.look(info)
    families = text_string_to_metric_families(registry.exposition().decode())
    return {sample.name: sample.value for family in families for sample in family.samples}


def tally() -> tuple[EngineTally, Registry]:
    registry = Registry((*CATALOG, *DEVICE_CATALOG))
    return EngineTally(registry), registry


def test_totals_go_on_when_an_engine_starts_again_from_zero() -> None:
    counting, registry = tally()
    for report in (step(5, preemptions=3), step(9, preemptions=4), StepReport([]), step(2, preemptions=1)):
        counting.take(report)
    metrics = seen(counting, registry)
    assert metrics["penstock_preemptions_total"] == 5
    assert metrics["penstock_busy_seconds_total"] == pytest.approx(0.022)
    assert metrics["penstock_step_seconds_count"] == 3, "what reports no step is none"


def test_what_was_pulled_from_other_engines_and_lent_to_them_is_counted() -> None:
    counting, registry = tally()
    transfer = KvTransferTotals(
        pulled_tokens=160, pulls=4, failed_pulls=1, pull_s=0.5, lent_tokens=32, kv_sources=(("shm", 2),)
    )
    counting.take(StepReport([], EngineMeasurements(EngineLoad(steps=1), transfer=transfer)))
    metrics = seen(counting, registry)
    assert metrics["penstock_kv_pulled_tokens_total"] == 160
    assert (metrics["penstock_kv_pulls_total"], metrics["penstock_kv_failed_pulls_total"]) == (4, 1)
    assert metrics["penstock_kv_pull_seconds_total"] == 0.5
    assert metrics["penstock_kv_lent_tokens_total"] == 32
    assert metrics["penstock_kv_sources"] == 2


def test_the_bandwidth_used_is_weights_and_context_over_the_time_of_the_steps() -> None:
    counting, registry = tally()
    for number in range(1, 200):
        counting.take(step(number))
    assert seen(counting, registry)["penstock_mbu_ratio"] == pytest.approx((1000 + 50 * 10) / 0.002 / 1e6)


def test_the_room_in_the_cache_is_told_with_its_number_format() -> None:
    counting, registry = tally()
    counting.take(step(1))
    assert seen(counting, registry)["penstock_kv_capacity_tokens"] == 160
    assert seen(counting, registry)["penstock_kv_usage_ratio"] == 0.25
    assert b'penstock_kv_capacity_tokens{format="bfloat16"} 160' in registry.exposition()


def test_it_is_absent_where_nobody_has_measured_the_device() -> None:
    counting, registry = tally()
    counting.take(step(1))
    assert "penstock_mbu_ratio" not in seen(counting, registry, None)


def test_experts_have_a_few_series_however_many_they_are() -> None:
    counting, registry = tally()
    load = ExpertLoad({layer: LayerLoad([6, 1, 1, 0], [[0, 1], [2, 3]], [7, 1]) for layer in range(3)})
    counting.look_at_experts(load, load)
    lines = [line for line in registry.exposition().decode().splitlines() if "expert" in line and line[0] != "#"]
    assert sorted(lines) == [
        'penstock_expert_imbalance_ratio{among="experts"} 3.0',
        'penstock_expert_imbalance_ratio{among="ranks"} 1.75',
        'penstock_rank_expert_tokens_total{rank="0"} 21',
        'penstock_rank_expert_tokens_total{rank="1"} 3',
    ]
    counting.look_at_experts(None, None)
    assert b"expert_imbalance_ratio{" not in registry.exposition()


def test_ranks_have_their_own_numbers_and_those_that_are_no_more_have_none() -> None:
    counting, registry = tally()
    readings = [
        RankReading(0, "", RankUsage(100, 1.5, busy_s=6.0)),
        RankReading(1, "node 1, 10.0.0.8", RankUsage(200, None)),
        RankReading(2, "", RankUsage(300, 0.5, is_estimated=True, device="GPU-1")),
    ]
    counting.look_at_ranks(RankNews(readings, [RankFigures(0), RankFigures(2, device="GPU-1", mbu=0.625)]))
    text = registry.exposition()
    assert b'penstock_rank_memory_bytes{rank="0",node="",device=""} 100' in text
    assert b'penstock_rank_memory_bytes{rank="1",node="node 1, 10.0.0.8",device=""} 200' in text
    assert b'penstock_rank_busy_seconds_total{rank="0",node="",device=""} 6' in text
    spent = b"penstock_rank_communication_seconds_total"
    assert spent + b'{rank="0",node="",device="",method="measured"} 1.5' in text
    assert spent + b'{rank="2",node="",device="GPU-1",method="estimated"} 0.5' in text
    assert spent + b'{rank="1"' not in text
    assert b'penstock_rank_mbu_ratio{rank="2",node="",device="GPU-1"} 0.625' in text
    assert b'penstock_rank_mbu_ratio{rank="0"' not in text
    counting.look_at_ranks(RankNews([], []))
    assert b"penstock_rank_memory_bytes{" not in registry.exposition()
