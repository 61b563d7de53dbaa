from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock.capacity.smallest import needs_of
from penstock.core.devices import VisibleGpu, VisibleGpus
from penstock.core.errors import ConfigError
from penstock.core.hashing import ROUTING_TOKENS
from penstock.core.parallelism import parallelism_of
from penstock.core.settings import EngineSettings
from penstock.engine_process import parallelism
from penstock.engine_process.parallelism import choose_for, with_parallelism
from penstock.model.random_weights import RandomCheckpoint
from penstock.runner.limits import resolve_limits
from tests.model.family_configs import CONFIGS, SHAPE

CPU = EngineSettings(device="cpu", load="dummy")
FOUR = VisibleGpus((VisibleGpu("NVIDIA H200", 140 << 30, 139 << 30),) * 4, 4)


def test_a_cpu_has_one_rank_unless_more_are_asked_for() -> None:
    settings, choice = with_parallelism(CPU, RandomCheckpoint(SHAPE))
    assert (settings, choice.lines) == (CPU, ())
    settings, choice = with_parallelism(replace(CPU, tp=2), RandomCheckpoint(SHAPE))
    assert (settings.tp, settings.ep, choice.lines) == (2, 1, ("tensor parallel 2",))


def test_stages_are_named_and_more_than_layers_are_refused() -> None:
    settings, choice = with_parallelism(replace(CPU, pp=2), RandomCheckpoint(SHAPE))
    assert (settings.tp, settings.pp, choice.lines) == (1, 2, ("pipeline parallel 2",))
    with pytest.raises(ConfigError, match=r"^2 layers cannot be split into 3 stages$"):
        with_parallelism(replace(CPU, pp=3), RandomCheckpoint(SHAPE))


def test_nodes_have_a_stage_each_where_nobody_says_how_many_ranks_there_are() -> None:
    settings, choice = with_parallelism(replace(CPU, nnodes=2), RandomCheckpoint(SHAPE))
    assert (settings.tp, settings.pp, choice.lines) == (1, 2, ("pipeline parallel 2",))
    asked, _ = with_parallelism(replace(CPU, nnodes=2, tp=2), RandomCheckpoint(SHAPE))
    assert (asked.tp, asked.pp) == (2, 1)


def test_a_pipeline_that_was_chosen_is_in_the_settings_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No number of ranks divides the MLP, and a whole context needs both GPUs."""
    few = VisibleGpus((VisibleGpu("NVIDIA H200", 4 << 30, 4 << 30),) * 2, 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(parallelism, "visible_gpus", lambda cuda: few)
    shape = replace(SHAPE, intermediate_size=251, num_layers=40, context_length=1 << 18)
    settings, choice = with_parallelism(EngineSettings(load="dummy", chunk_tokens=64), RandomCheckpoint(shape))
    assert (settings.tp, settings.pp) == (1, 2)
    assert choice.lines[0].startswith("pipeline parallel 2: ")
    assert "intermediate size of 251 cannot be split so" in choice.lines[1]


def test_experts_that_are_shared_out_say_over_how_many_ranks() -> None:
    settings, choice = with_parallelism(replace(CPU, ep=2), RandomCheckpoint(CONFIGS["mixtral"]))
    assert (settings.tp, settings.ep) == (2, 2)
    assert choice.lines == ("tensor parallel 2, expert parallel 2",)


def test_ranks_share_out_tokens_where_heads_of_keys_have_run_out() -> None:
    """Two heads of keys: four ranks would keep each token twice. A block is as many times as long."""
    settings, choice = with_parallelism(replace(CPU, tp=4), RandomCheckpoint(SHAPE))
    assert (settings.tp, settings.sp) == (4, 2)
    assert choice.lines == ("tensor parallel 4, sequence parallel 2",)
    assert choice.parallelism.short == "TP4 SP2"
    assert resolve_limits(SHAPE, settings, "cpu").block_size == 32
    copied, _ = with_parallelism(replace(CPU, tp=4, sp=1), RandomCheckpoint(SHAPE))
    assert copied.sp == 1
    asked, _ = with_parallelism(replace(CPU, sp=2), RandomCheckpoint(SHAPE))
    assert (asked.tp, asked.sp) == (2, 2)


def test_a_routing_block_has_whole_blocks_however_many_ranks_share_them() -> None:
    for sp in (1, 2, 4, 8, 16):
        for device in ("cpu", "cuda"):
            assert ROUTING_TOKENS % resolve_limits(SHAPE, EngineSettings(sp=sp), device).block_size == 0


def test_groups_that_do_not_fit_together_are_refused_by_what_does_not() -> None:
    with pytest.raises(ConfigError, match=r"3 ranks cannot be split into groups of 2 .*: sp must divide tp") as told:
        with_parallelism(replace(CPU, tp=3, sp=2), RandomCheckpoint(replace(SHAPE, num_heads=12, num_kv_heads=3)))
    with pytest.raises(ConfigError, match="sp is 2: it must divide tp") as again:
        parallelism_of(EngineSettings(tp=3, sp=2), SHAPE)
    assert again.value.param == "sp"
    three = replace(SHAPE, num_heads=12, num_kv_heads=3)
    with pytest.raises(
        ConfigError, match="3 heads of keys and values cannot be split over 2 groups of 2 ranks"
    ) as told:
        with_parallelism(replace(CPU, tp=4, sp=2), RandomCheckpoint(three))
    assert told.value.param == "tp", "it cannot be had without sp either"
    with pytest.raises(ConfigError, match="15 query heads cannot be split over 2 ranks") as told:
        with_parallelism(replace(CPU, tp=2, sp=2), RandomCheckpoint(replace(SHAPE, num_heads=15, num_kv_heads=5)))
    assert told.value.param == "sp"


def test_ranks_that_cannot_share_the_shape_are_refused_before_anything_is_started() -> None:
    with pytest.raises(ConfigError, match=r"intermediate size of 250 cannot be split over 4 ranks.*work: 1, 2"):
        with_parallelism(replace(CPU, tp=4), RandomCheckpoint(replace(SHAPE, num_kv_heads=4, intermediate_size=250)))


def test_a_model_to_draft_with_and_adapters_take_room_from_every_rank() -> None:
    large = replace(SHAPE, hidden_size=8192, intermediate_size=28_672, num_layers=80, num_heads=64, num_kv_heads=8)
    target = RandomCheckpoint(replace(large, head_dim=128))
    draft = RandomCheckpoint(replace(large, head_dim=128, num_layers=50))
    gpu = EngineSettings(load="dummy")
    assert choose_for(gpu, target, FOUR).parallelism.tp == 2
    assert choose_for(gpu, target, FOUR, draft=draft).parallelism.tp == 4
    assert choose_for(replace(gpu, max_loras=40), target, FOUR).parallelism.tp == 4


def test_files_in_fp8_are_widened_where_a_gpu_has_none() -> None:
    config = replace(SHAPE, quantization="fp8")
    assert needs_of(EngineSettings(), config).formats.weights == "fp8"
    assert needs_of(EngineSettings(), config, has_fp8=False).formats.weights == "bfloat16"
    assert needs_of(EngineSettings(quant="none", kv_dtype="fp8"), config).formats.kv == "fp8"
    assert needs_of(EngineSettings(quant="int4"), config).formats.weights == "int4"


@pytest.mark.parametrize("settings", [EngineSettings(), EngineSettings(chunk_tokens=64, max_model_len=100)])
def test_what_a_step_may_have_is_what_the_runner_gives_it_on_a_gpu(settings: EngineSettings) -> None:
    needs, limits = needs_of(settings, SHAPE), resolve_limits(SHAPE, settings, "cuda")
    assert (needs.chunk_tokens, needs.max_num_seqs) == (limits.chunk_tokens, limits.max_num_seqs)
    assert needs.max_model_len == limits.max_model_len
