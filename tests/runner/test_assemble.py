from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.core.sampling import SamplingParams
from penstock.core.settings import EngineSettings
from penstock.model.random_weights import RandomCheckpoint
from penstock.runner import memory
from penstock.runner.assemble import Assembly, assemble
from penstock.sched.plan import SampleSpec, Slice, StepPlan
from tests.devices import NEEDS_GPU
from tests.runner.small import CONFIG


def assembled(**settings: object) -> Assembly:
    return assemble(RandomCheckpoint(CONFIG), EngineSettings(device="cpu", **settings), lambda *_: None)  # type: ignore[arg-type]


def test_auto_is_resolved_to_what_the_model_and_the_machine_allow() -> None:
    made = assembled(dtype="float32", chunk_tokens=32)
    assert made.limits.max_model_len == CONFIG.context_length
    assert made.size.num_blocks == 1024
    assert made.limits.max_num_seqs == 32  # never more sequences than tokens in a step
    assert (made.formats.number_format, made.formats.quant, made.formats.kv_dtype) == ("float32", "none", "float32")
    assert made.size.kv_bytes == 1024 * 16 * CONFIG.kv_bytes_per_token(4)


def test_a_cache_in_int8_has_scales_and_runs() -> None:
    made = assembled(dtype="float32", kv_dtype="int8")
    assert made.formats.kv_dtype == "int8"
    assert made.size.num_blocks == 1024
    heads = 2 * CONFIG.num_layers * CONFIG.num_kv_heads
    assert made.size.kv_bytes == 1024 * 16 * heads * (CONFIG.head_dim + 2)
    spec = SampleSpec(SamplingParams(temperature=0.0), history=[1, 2, 3], prompt_len=3, position=3)
    sampled = made.runner.submit(StepPlan([Slice("a", 0, 3, [1, 2, 3], [0], spec, epoch=0)])).result().sampled
    assert sampled[0] is not None


def test_a_model_stored_in_fp8_is_widened_on_a_cpu() -> None:
    checkpoint = RandomCheckpoint(replace(CONFIG, quantization="fp8"))
    assert assemble(checkpoint, EngineSettings(device="cpu", dtype="float32"), lambda *_: None).formats.quant == "none"


def test_adapters_have_eight_places_on_a_cpu_unless_it_is_said() -> None:
    for settings, expected in (({}, 8), ({"max_loras": 3}, 3)):
        adapters = assembled(dtype="float32", **settings).adapters
        assert adapters is not None
        assert adapters.num_slots == expected
    assert assembled(dtype="float32", max_loras=0).adapters is None


def test_a_context_that_the_cache_has_no_room_for_is_cut(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    block_bytes = 16 * CONFIG.kv_bytes_per_token(4)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000 * block_bytes)
    made = assembled(dtype="float32", memory_fraction=0.0035)
    assert made.size.num_blocks == 3
    assert made.limits.max_model_len == 48
    assert "no room for more" in caplog.text


def test_a_cache_has_no_more_blocks_than_it_may() -> None:
    settings = EngineSettings(device="cpu", dtype="float32")
    whole, small, large = (
        assemble(RandomCheckpoint(CONFIG), settings, lambda *_: None, max_blocks=most).size for most in (None, 3, 5000)
    )
    assert (small.num_blocks, small.limits.max_model_len) == (3, 48)
    assert small.kv_bytes == 3 * 16 * CONFIG.kv_bytes_per_token(4)
    assert large == whole


def test_phases_are_told_in_order_and_layer_by_layer() -> None:
    told: list[tuple[str, int, int]] = []
    settings = EngineSettings(device="cpu", dtype="float32")
    assemble(RandomCheckpoint(CONFIG), settings, lambda *phase: told.append(phase))
    assert told == [("kernels", 0, 0), ("weights", 0, 2), ("weights", 1, 2), ("weights", 2, 2), ("cache", 0, 0)]


def test_the_runner_runs_a_step_in_which_only_some_sample() -> None:
    spec = SampleSpec(SamplingParams(temperature=0.0), history=[1, 2, 3], prompt_len=3, position=3)
    whole = Slice("a", 0, 3, [1, 2, 3], [0], spec, epoch=0)
    chunk = Slice("b", 0, 2, [4, 5], [1], None, epoch=0)
    runner = assembled(dtype="float32").runner
    first, second = runner.submit(StepPlan([whole, chunk])).result().sampled
    assert first is not None
    assert len(first.token_ids) == 1
    assert second is None
    assert runner.submit(StepPlan([chunk])).result().sampled == [None]


@pytest.mark.parametrize(
    "settings",
    [{"max_model_len": CONFIG.context_length + 1}, {"dtype": "float16"}, {"quant": "fp8"}, {"kv_dtype": "fp8"}],
)
def test_what_the_model_or_the_processor_cannot_do_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as refused:
        assembled(**settings)
    assert refused.value.param == next(iter(settings))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="no GPU"):
        assemble(RandomCheckpoint(CONFIG), EngineSettings(device="cuda"), lambda *_: None)


@NEEDS_GPU
def test_a_share_of_a_gpu_too_small_for_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="memory_fraction allows"):
        assemble(RandomCheckpoint(CONFIG), EngineSettings(device="cuda", memory_fraction=1e-6), lambda *_: None)
