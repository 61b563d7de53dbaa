"""What models are told to need of a device that they share, and the plan that is made of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cli.before_serving import check
from penstock.cli.model_needs import Device, needs_of, tensor_needs
from penstock.cli.serve_models import check_plan
from penstock.core.errors import ConfigError
from penstock.core.settings import EngineSettings, Settings
from penstock.fleet.residency.memory_plan import ModelNeeds
from penstock.fleet.residency.settings import ModelEntry, ModelsSettings
from penstock.tensors.repository import open_directory
from tests.cli.tiny_model import write_tiny_model
from tests.runner.seeing import STACKED

GIB = 1 << 30
CPU = Device("cpu", 2 * GIB, False, 8 * GIB)
GPU = Device("H", 60 * GIB, True, 80 * GIB)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_model(directory, max_position_embeddings=1 << 14)
    return Settings(model=str(directory), engine=EngineSettings(load="dummy"))


def test_a_model_has_a_floor_of_cache_and_the_device_s_own_fixed_memory(tiny: Settings) -> None:
    files, entry = check(tiny), ModelEntry(model=tiny.model)
    on_cpu, on_gpu = (needs_of("m", entry, tiny, files, device) for device in (CPU, GPU))
    assert on_cpu.floor_bytes == on_gpu.floor_bytes > 0
    assert on_gpu.fixed_bytes > 2 * GIB, "the driver's context and what else no tensor is"
    assert on_gpu.parked_bytes == GIB
    assert on_cpu.parked_bytes == on_cpu.fixed_bytes, "a parked model's weights are where they were"
    assert on_gpu.most_bytes == GPU.for_models_bytes
    assert on_cpu.most_bytes < CPU.for_models_bytes


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
def test_the_encoder_of_images_and_what_it_makes_of_them_are_counted(tiny: Settings, device: Device) -> None:
    plain, entry = check(tiny), ModelEntry(model=tiny.model)
    seeing: Any = SimpleNamespace(path=plain.path, config=replace(plain.config, vision=STACKED))
    few = replace(tiny, engine=replace(tiny.engine, max_image_tokens=1024))
    blind, some, most = (needs_of("m", entry, *each, device) for each in ((tiny, plain), (few, seeing), (tiny, seeing)))
    assert some.fixed_bytes - blind.fixed_bytes > 2 * STACKED.num_parameters(plain.config.hidden_size)
    number_bytes = 2 if device.is_gpu else 4
    kept = (16_384 - 1024) * STACKED.levels * plain.config.hidden_size * number_bytes
    assert most.fixed_bytes - some.fixed_bytes > kept


def test_the_file_may_say_what_a_model_needs(tiny: Settings) -> None:
    entry = ModelEntry(model=tiny.model, weights_gib=1.0, kv_floor_gib=0.5, kv_share=3.0)
    plain = needs_of("m", ModelEntry(model=tiny.model, weights_gib=0.25), tiny, check(tiny), CPU)
    needs = needs_of("m", entry, tiny, check(tiny), CPU)
    assert needs.fixed_bytes - plain.fixed_bytes == 3 * GIB // 4
    assert (needs.floor_bytes, needs.share) == (GIB // 2, 3.0)


def test_models_over_several_ranks_share_no_device(tiny: Settings) -> None:
    several = Settings(model=tiny.model, engine=EngineSettings(load="dummy", tp=2))
    with pytest.raises(ConfigError, match="one rank each"):
        needs_of("m", ModelEntry(model=tiny.model), several, check(tiny), CPU)


def test_a_model_of_tensors_needs_its_weights_twice_for_each_instance(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"x" * 1000)
    (tmp_path / "m.onnx.data").write_bytes(b"x" * 9000)
    entry = ModelEntry(model=str(tmp_path / "m.onnx"))
    needs = tensor_needs("m", entry, EngineSettings(), open_directory(entry.model), CPU)
    assert needs.fixed_bytes == (256 << 20) + 20_000
    assert (needs.floor_bytes, needs.most_bytes) == (0, 0)
    assert not tensor_needs("m", entry, EngineSettings(), open_directory(entry.model), GPU).fixed_bytes, (
        "it computes on the CPU"
    )


def test_the_plan_names_what_is_loaded_at_the_start_and_refuses_what_never_fits() -> None:
    models = ModelsSettings(models={"a": "x", "b": "x", "c": {"model": "x", "pinned": True}})
    needs = [ModelNeeds(name, GIB // 2, GIB // 4, GIB) for name in "abc"]
    assert check_plan(CPU, needs, models) == [
        "memory plan of cpu, 2.00 GiB for models:",
        "  a: 0.50 GiB, and a KV cache of 0.25 GiB and more",
        "  b: 0.50 GiB, and a KV cache of 0.25 GiB and more",
        "  c: 0.50 GiB, and a KV cache of 0.25 GiB and more",
        "  loaded at the start: c, a; by use: b",
    ]
    needs[0] = ModelNeeds("a", 2 * GIB, GIB // 4, GIB)
    with pytest.raises(ConfigError, match=r"a needs 2.25 GiB.*2.00 GiB for models.*0.75 GiB are taken") as refused:
        check_plan(CPU, needs, models)
    assert refused.value.param == "models.a"
