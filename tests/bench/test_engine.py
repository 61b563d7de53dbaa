from pathlib import Path

import pytest

from penstock.bench.engine import Round, figure, make_requests, run_round, workload
from penstock.bench.roofline import EngineWorkload, Roofline
from penstock.bench.shapes import SHAPES, shape
from penstock.capacity.hardware import Peaks
from penstock.core.errors import ConfigError
from penstock.engine.fake import FakeRunner
from penstock.kv.cache import KVCache
from penstock.sched.budget import StepBudget
from penstock.sched.scheduler import Scheduler


@pytest.mark.parametrize("overlaps", [False, True])
def test_every_token_of_a_workload_is_made(overlaps: bool) -> None:
    work = EngineWorkload("tiny", [(20, 5), (40, 3), (33, 1)], shared=16)
    scheduler = Scheduler(KVCache(200, 16), StepBudget(64, target_s=None, floor=16), max_num_seqs=8)
    runner = FakeRunner(200, 16, overlaps=overlaps)
    found = run_round(work, 0, vocab_size=100, scheduler=scheduler, runner=runner, busy_s=None)
    assert scheduler.counters.generated_tokens == 9
    assert found.steps >= 5
    assert found.device_idle is None


def test_the_best_round_is_shown_and_all_are_kept() -> None:
    work = EngineWorkload("tiny", [(20, 5), (40, 3)])
    rounds = [Round(2.0, 6, 0.5), Round(1.0, 5, 0.25), Round(3.0, 7, None)]
    shown = figure(
        work,
        rounds,
        Roofline(SHAPES["llama1b"], "bfloat16", "none", "bfloat16", Peaks(4.41, {"bfloat16": 765, "fp8": 1402})),
    )
    assert shown.rounds == rounds
    assert (shown.seconds, shown.steps, shown.device_idle) == (1.0, 5, 0.25)
    assert (shown.output_tokens_per_s, shown.prompt_tokens_per_s) == (8.0, 60.0)
    assert shown.mbu is not None
    assert shown.mfu is not None


def test_no_share_is_given_of_a_roof_that_nobody_measured() -> None:
    shown = figure(EngineWorkload("tiny", [(20, 2)]), [Round(1.0, 2, None)], None)
    assert (shown.mbu, shown.mfu, shown.device_idle) == (None, None, None)


def test_prompts_are_new_in_every_round_but_share_what_they_should() -> None:
    work = workload("W4", None)
    one, other = make_requests(work, 1000, 0), make_requests(work, 1000, 1)
    assert len({tuple(request.prompt_ids[:2048]) for request in one}) == 1
    assert len({tuple(request.prompt_ids) for request in one}) == 256
    assert one[0].prompt_ids[:2048] != other[0].prompt_ids[:2048]
    assert {len(request.prompt_ids) for request in one} == {2176}


def test_a_trace_gives_the_lengths_cut_to_what_fits(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,374,44", "2023-11-16 18:15:47,9000,2000"]
    trace.write_text("\n".join(rows))
    assert workload("W3", trace).lengths == [(374, 44), (7000, 1000)]


def test_unknown_names_are_told_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="W1, W1b"):
        workload("W9", None)
    with pytest.raises(ConfigError, match="llama8b"):
        shape("llama9b")
    with pytest.raises(ConfigError, match="--trace"):
        workload("W3", None)


def test_a_shape_may_have_fewer_layers_and_no_more() -> None:
    assert shape("llama70b", 4).num_layers == 4
    assert shape("llama70b", 4).hidden_size == SHAPES["llama70b"].hidden_size
    with pytest.raises(ConfigError, match="llama70b has 80 layers"):
        shape("llama70b", 81)
