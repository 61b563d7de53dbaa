"""Whole tiny models, quantized into directories: what is written, what is read, and runs that were killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from penstock.core.errors import ConfigError, ModelUnsupported
from penstock.core.model_config import ModelConfig
from penstock.hub.quantized_directory import QuantizedDirectory, tensor_bytes
from penstock.quant.layerwise import rounded
from penstock.quant.quality import judged, walked
from penstock.quant.recipe import METHODS, MethodName, make_recipe
from tests.hub.families import FAMILIES
from tests.quant.runs import CPU, Killed, Runs, run, saved, tokens, walk

SHAPE = ModelConfig("llama", 96, 64, 96, 2, 4, 2, 16, 256)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_a_directory_holds_the_model_it_was_made_of(family: str, method: MethodName, runs: Runs) -> None:
    original, made = runs.original(family), runs.made(family, method)
    assert made.config.quantization == {"gptq": "int4", "awq": "int4", "int8": "w8a8", "fp8": "fp8"}[method]
    assert made.tensor_names() == original.tensor_names()
    after = judged(walk(made), runs.before(family))
    # A model that nobody trained predicts next to nothing; what counts is that no part went elsewhere.
    assert after.divergence < (0.05 if made.config.quantization == "int4" else 0.005), after


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_fitting_to_data_moves_predictions_less_than_rounding(method: MethodName, runs: Runs) -> None:
    original, before = runs.original("llama"), runs.before("llama")
    recipe = make_recipe(original.config, method)
    nearest = walked(original, tokens(seed=1), CPU, lambda *_: None, lambda layer: rounded(layer, recipe.nearest))
    after = walk(runs.made("llama", method))
    assert judged(after, before).divergence < judged(nearest, before).divergence


@pytest.mark.parametrize("method", ["gptq", "awq", "int8"])
def test_a_killed_run_goes_on_and_ends_as_if_nothing_had_been(method: MethodName, tmp_path: Path, runs: Runs) -> None:
    original = runs.original("qwen2")
    recipe = make_recipe(original.config, method)
    out = tmp_path / "killed"
    for layer in range(2):
        with pytest.raises(Killed):
            run(original, recipe, out, killed_at=layer + 1)
        assert not (out / "config.json").exists()  # nobody takes it for a model
        assert len(list(out.glob("*.safetensors"))) >= layer + 1
    (out / "model-00003-of-00003.safetensors").unlink(missing_ok=True)
    (out / "model-00003-of-00003.safetensors.part").write_bytes(b"half")
    run(original, recipe, out)
    for path in runs.made("qwen2", method).path.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    assert not list(out.glob("*.part"))


def test_the_tokenizer_and_the_config_come_along(runs: Runs) -> None:
    made = runs.made("llama", "gptq").path
    config = json.loads((made / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "gptq"
    assert config["torch_dtype"] == "float16"
    assert config["hidden_size"] == 64
    assert (made / "tokenizer.json").read_text() == "{}"
    assert (made / "chat_template.jinja").is_file()


def test_a_directory_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="not empty"), QuantizedDirectory.opened(tmp_path, {"method": "gptq"}, 2):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(ConfigError, match="is a file"), QuantizedDirectory.opened(tmp_path / "thesis.txt", {}, 2):
        pass


def test_a_run_that_was_killed_before_it_began_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / ".quantize.lock").touch()
    (tmp_path / "quantize.json.part").write_text('{"meth')
    with QuantizedDirectory.opened(tmp_path, {"method": "gptq"}, 2) as directory:
        assert not directory.is_complete
    assert [path.name for path in tmp_path.iterdir()] == ["quantize.json"]


def test_a_run_with_other_arguments_does_not_go_on_with_it(tmp_path: Path) -> None:
    with QuantizedDirectory.opened(tmp_path / "out", {"method": "gptq", "bits": 4}, 2):
        pass
    with (
        pytest.raises(ConfigError, match="differs in bits"),
        QuantizedDirectory.opened(tmp_path / "out", {"method": "gptq", "bits": 8}, 2),
    ):
        pass


@pytest.mark.parametrize(
    ("method", "wish", "said"),
    [
        ("awq", {"bits": 8}, "awq has 4 bits, not 8"),
        ("gptq", {"bits": 3}, "gptq has 4 or 8 bits, not 3"),
        ("gptq", {"group": 128}, "groups of 128 do not divide .* 32, 16 do"),
        ("gptq", {"group": 0}, "groups of 0"),
        ("fp8", {"group": 32}, "a scale per output"),
        ("awq", {"symmetric": True}, "zero points"),
        ("int8", {"symmetric": False}, "symmetric"),
        ("awq", {"act_order": True}, "act-order"),
    ],
)
def test_a_wish_that_cannot_be_is_refused(method: MethodName, wish: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_recipe(SHAPE, method, **wish)  # type: ignore[arg-type]


def test_the_group_is_the_largest_that_divides_all_columns() -> None:
    assert make_recipe(SHAPE, "gptq").group == 32
    assert make_recipe(ModelConfig("llama", 96, 576, 1536, 2, 9, 3, 64, 256), "awq").group == 64
    assert make_recipe(ModelConfig("llama", 96, 4096, 14336, 2, 32, 8, 128, 256), "gptq").group == 128
    assert make_recipe(SHAPE, "int8").group is None
    assert make_recipe(SHAPE, "int8", group=32).group == 32


def test_shapes_that_no_layout_can_pack_are_refused() -> None:
    with pytest.raises(ModelUnsupported, match="pack 8 numbers"):
        make_recipe(ModelConfig("llama", 96, 60, 96, 2, 4, 2, 15, 256), "gptq")
    with pytest.raises(ModelUnsupported, match="no group"):
        make_recipe(ModelConfig("llama", 96, 72, 96, 2, 3, 3, 24, 256), "gptq")


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_four_bits_in_groups_of_128_take_73_percent_less_than_16(method: MethodName, tmp_path: Path) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(vocab_size=96, num_hidden_layers=1, max_position_embeddings=64, **shape)
    original = saved(config, tmp_path / "original")
    recipe = make_recipe(original.config, method)
    assert recipe.group == 128
    made = run(original, recipe, tmp_path / "made")
    linears = [name for name in made.tensor_names() if name.endswith("_proj.weight")]
    in_16_bits = 2 * sum(original.tensor(name).size for name in linears)
    in_files = sum(size for name, size in tensor_bytes(made.path) if "_proj." in name)
    assert len(linears) == 7
    assert 1 - in_files / in_16_bits > 0.73
