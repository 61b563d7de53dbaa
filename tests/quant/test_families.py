"""Gemma, Phi and mixtures of experts, quantized into directories: joined projections, norms that count from one,
routers, and experts that the text does not reach."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from penstock.core.errors import ModelUnsupported
from penstock.hub.gguf import GGUFCheckpoint
from penstock.hub.hf import HFCheckpoint
from penstock.hub.quantized_directory import QuantizedDirectory
from penstock.hub.stored import GroupedTensor
from penstock.model.loading import load_model
from penstock.model.ops.reference import ReferenceOps
from penstock.quant import mixture
from penstock.quant.job import quantize
from penstock.quant.layerwise import rounded
from penstock.quant.quality import judged, walked
from penstock.quant.recipe import METHODS, MethodName, make_recipe
from penstock.quant.walk import LAYERS, check_family
from tests.hub.more_families import MORE, write_gguf
from tests.hub.more_families import saved as saved_arrays
from tests.model.family_configs import CONFIGS
from tests.model.paged import PagedDriver
from tests.quant.runs import CPU, Killed, Runs, run, tokens, walk

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")


QUANTIZED = [name for name, config in MORE.items() if config.model_type in LAYERS]


def test_a_family_that_cannot_be_quantized_is_refused_by_name() -> None:
    with pytest.raises(ModelUnsupported, match="'olmo2' cannot be quantized here"):
        check_family(CONFIGS["olmo2"])


@pytest.mark.slow
@pytest.mark.parametrize("family", QUANTIZED)
@pytest.mark.parametrize("method", METHODS)
def test_a_directory_holds_the_model_it_was_made_of(family: str, method: MethodName, runs: Runs) -> None:
    original, made, before = runs.original(family), runs.made(family, method), runs.before(family)
    recipe = make_recipe(original.config, method)
    assert made.tensor_names() == original.tensor_names()
    after = judged(walk(made), before)
    assert after.divergence < {4: 0.05, 8: 0.015}[recipe.bits], after
    if recipe.needs_data:
        nearest = walked(original, tokens(seed=1), CPU, lambda *_: None, lambda layer: rounded(layer, recipe.nearest))
        assert after.divergence < judged(nearest, before).divergence


@pytest.mark.parametrize("family", ["gemma2", "phi4", "qwen2_moe"])
def test_the_walk_says_what_the_model_says(family: str, runs: Runs) -> None:
    original, ops = runs.original(family), ReferenceOps()
    expected = PagedDriver(load_model(original, ops), ops, block_size=16).prefill(list(range(40)))
    ((found, _),) = walked(original, torch.arange(40)[None], CPU, lambda *_: None).outputs()
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_norms_that_count_from_one_are_stored_so_after_scaling(runs: Runs) -> None:
    original, made = runs.original("gemma2"), runs.made("gemma2", "awq")
    assert make_recipe(original.config, "awq").dtype == "bfloat16"  # a Gemma's activations are too large for float16
    for name in (
        "input_layernorm",
        "pre_feedforward_layernorm",
        "post_attention_layernorm",
        "post_feedforward_layernorm",
    ):
        before, after = (one.tensor(f"model.layers.0.{name}.weight") for one in (original, made))
        is_same = np.allclose(before, after, atol=0.01)
        assert is_same == name.startswith("post"), name  # what comes after a linear is no place for its scales
        assert abs(float(after.mean())) < 0.5  # and not around one


def test_a_gemma_from_a_gguf_is_written_as_its_directory_is(tmp_path: Path) -> None:
    _, tensors = saved_arrays("gemma2", tmp_path / "hf")
    original = GGUFCheckpoint(write_gguf(tmp_path / "model.gguf", MORE["gemma2"], tensors))
    recipe = make_recipe(original.config, "gptq")
    with QuantizedDirectory.opened(tmp_path / "made", {}, original.config.num_layers) as directory:
        quantize(original, recipe, directory, tokens(), CPU, lambda *_: None)
        directory.finish(original, recipe.config(original.config), recipe.dtype, "{}", {})
    name = "model.layers.1.post_feedforward_layernorm.weight"
    np.testing.assert_allclose(HFCheckpoint(tmp_path / "made").tensor(name), tensors[name], atol=0.01)


def test_of_a_model_that_sees_what_is_written_only_speaks(tmp_path: Path) -> None:
    directory, tensors = saved_arrays("gemma3_text", tmp_path / "original")
    renamed = {f"language_model.{name}": values for name, values in tensors.items()}
    save_file(renamed | {"vision_tower.patches.weight": np.ones((2, 2), np.float32)}, directory / "model.safetensors")
    inner = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": inner}))
    (directory / "tokenizer.json").write_text("{}")
    original = HFCheckpoint(directory)
    made = run(original, make_recipe(original.config, "int8"), tmp_path / "made")
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("gemma3_text", ["Gemma3ForCausalLM"])
    assert made.tensor_names() == original.tensor_names()
    assert made.config.windows == original.config.windows


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_projections_that_a_file_joins_stay_joined_and_in_its_order(method: MethodName, runs: Runs) -> None:
    """Phi-4's heads are rotated in part, so its rows lie otherwise in memory."""
    original, made = runs.original("phi4"), runs.made("phi4", method)
    for name in ("self_attn.qkv_proj", "mlp.gate_up_proj"):
        stored = made.stored(f"model.layers.0.{name}.weight")
        assert isinstance(stored, GroupedTensor)
        before = original.tensor(f"model.layers.0.{name}.weight")
        after = stored.widened()
        if method == "awq":  # columns were scaled, and the last rows
            norm = {"self_attn.qkv_proj": "input", "mlp.gate_up_proj": "post_attention"}[name]
            was, now = (one.tensor(f"model.layers.0.{norm}_layernorm.weight") for one in (original, made))
            before, after = (before * was)[:64], (after * now)[:64]
        rows = np.sum(before * after, axis=1) / (np.linalg.norm(before, axis=1) * np.linalg.norm(after, axis=1))
        assert rows.min() > 0.95


@pytest.mark.parametrize("method", METHODS)
def test_routers_are_never_quantized(method: MethodName, runs: Runs) -> None:
    original, made = runs.original("qwen2_moe"), runs.made("qwen2_moe", method)
    recipe = make_recipe(original.config, method)
    for name in ("gate", "shared_expert_gate"):
        before, after = (one.stored(f"model.layers.1.mlp.{name}.weight") for one in (original, made))
        assert not isinstance(after, GroupedTensor)
        assert after.format in ("F16", "BF16")
        if method != "awq":  # which scales what they read
            np.testing.assert_allclose(after.widened(), before.widened(), rtol=0.01, atol=1e-3)
    plain = str(recipe.config(original.config))
    assert all(
        f"layers.{layer}.mlp.{gate}" in plain.replace("\\", "") for layer in range(2) for gate in ("gate", "shared")
    )


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_an_expert_that_is_given_too_little_is_rounded_and_named(
    method: MethodName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: Runs
) -> None:
    original = runs.original("mixtral")
    recipe = make_recipe(original.config, method)
    assert QuantizedDirectory(runs.made("mixtral", method).path, 2).starved() == []
    monkeypatch.setattr(mixture, "LEAST", 1e9)
    made = run(original, recipe, tmp_path / "none")
    starved = QuantizedDirectory(tmp_path / "none", 2).starved()
    assert starved == [f"model.layers.{layer}.block_sparse_moe.experts.{n}" for layer in range(2) for n in range(4)]
    name = f"{starved[5]}.w2.weight"
    nearest = recipe.nearest(torch.from_numpy(original.tensor(name).copy()))
    np.testing.assert_array_equal(made.tensor(name), nearest.dequantized().numpy())  # type: ignore[union-attr]


def test_a_killed_run_of_a_mixture_ends_as_if_nothing_had_been(tmp_path: Path, runs: Runs) -> None:
    original = runs.original("qwen2_moe")
    recipe = make_recipe(original.config, "awq")
    with pytest.raises(Killed):
        run(original, recipe, tmp_path / "killed", killed_at=1)
    run(original, recipe, tmp_path / "killed")
    for path in runs.made("qwen2_moe", "awq").path.iterdir():
        assert (tmp_path / "killed" / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_group_divides_what_is_inside_of_experts(runs: Runs) -> None:
    config = runs.original("qwen2_moe").config  # 64 columns, experts of 32 and 64 inside
    assert make_recipe(config, "gptq").group == 32
