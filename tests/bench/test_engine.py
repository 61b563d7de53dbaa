from pathlib import Path

import pytest

from penstock.bench.engine import DEVICES, EngineWorkload, make_requests, measure, workload
from penstock.bench.shapes import SHAPES, shape
from penstock.core.errors import ConfigError
from penstock.engine.fake import FakeRunner
from penstock.kv.cache import KVCache
from penstock.sched.budget import StepBudget
from penstock.sched.scheduler import Scheduler

CONFIG = SHAPES["llama1b"]


def make_scheduler() -> Scheduler:
    return Scheduler(KVCache(200, 16), StepBudget(64, target_s=None, floor=16), max_num_seqs=8)


@pytest.mark.parametrize("overlaps", [False, True])
def test_every_token_of_a_workload_is_made_and_counted(overlaps: bool) -> None:
    work = EngineWorkload("tiny", [(20, 5), (40, 3), (33, 1)], shared=16)
    figure = measure(
        work, CONFIG, make_scheduler, FakeRunner(200, 16, overlaps=overlaps), rounds=2, weight_bytes=1e9,
        kv_bytes_per_token=1e3, device=DEVICES["NVIDIA H200"], busy_s=None,
    )  # fmt: skip
    assert figure.output_tokens_per_s == pytest.approx(9 / figure.seconds)
    assert figure.prompt_tokens_per_s == pytest.approx(93 / figure.seconds)
    assert figure.steps >= 5
    # Weights once a step; every token's own context, and the shared 16 tokens once for each of the longest outputs.
    context = (4 * 5 + 12.5) + (24 * 3 + 4.5) + (17 * 1 + 0.5) + 16 * 5
    read_bytes = figure.steps * 1e9 + context * 1e3
    assert figure.mbu == pytest.approx(read_bytes / figure.seconds / 4.41e12)
    computed = 93 - 2 * 16 + 9
    assert figure.mfu == pytest.approx(2 * CONFIG.num_parameters * computed / figure.seconds / 765e12)


def test_no_share_is_given_of_a_roof_that_nobody_measured() -> None:
    figure = measure(
        EngineWorkload("tiny", [(20, 2)]), CONFIG, make_scheduler, FakeRunner(200, 16), rounds=1, weight_bytes=1e9,
        kv_bytes_per_token=1e3, device=None, busy_s=None,
    )  # fmt: skip
    assert (figure.mbu, figure.mfu, figure.device_idle) == (None, None, None)


def test_prompts_are_new_in_every_round_but_share_what_they_should() -> None:
    work = workload("W4", None)
    one, other = make_requests(work, 1000, 0), make_requests(work, 1000, 1)
    assert len({tuple(request.prompt_ids[:2048]) for request in one}) == 1
    assert len({tuple(request.prompt_ids) for request in one}) == 256
    assert one[0].prompt_ids[:2048] != other[0].prompt_ids[:2048]
    assert {len(request.prompt_ids) for request in one} == {2176}


def test_a_trace_gives_the_lengths_cut_to_what_fits(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\na,374,44\nb,9000,2000\n")
    assert workload("W3", trace).lengths == [(374, 44), (7000, 1000)]


def test_unknown_names_are_told_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="W1, W1b"):
        workload("W9", None)
    with pytest.raises(ConfigError, match="llama8b"):
        shape("llama9b")
    with pytest.raises(ConfigError, match="--trace"):
        workload("W3", None)
