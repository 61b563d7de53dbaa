from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from penstock.core.errors import ModelCorrupt, ModelError, ModelMissing, ModelUnsupported
from penstock.core.model_config import RopeScaling
from penstock.hub.hf import HFCheckpoint
from tests.hub.families import FAMILIES, SHAPE, random_model, tensors_of

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def saved(config: PreTrainedConfig, directory: Path, dtype: torch.dtype = torch.float32, **how: Any) -> Path:
    random_model(config).to(dtype).save_pretrained(directory, **how)
    return directory


def edit(directory: Path, file: str = "config.json", **values: Any) -> None:
    path = directory / file
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**content, **values}))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return saved(FAMILIES["llama"], tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_and_config_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    theirs = FAMILIES[family]
    checkpoint = HFCheckpoint(saved(theirs, tmp_path))
    expected = tensors_of(random_model(theirs))
    assert checkpoint.tensor_names() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), values, err_msg=name)
    ours = checkpoint.config
    assert ours.architecture == family
    assert (ours.num_layers, ours.num_heads, ours.num_kv_heads) == (2, 4, 2)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16)
    assert (ours.context_length, ours.norm_eps) == (256, theirs.rms_norm_eps)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    assert (ours.attention_bias, ours.output_bias) == (family == "qwen2", False)
    assert ours.windows == ((16, 16) if family == "mistral" else ())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_widened_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    checkpoint = HFCheckpoint(saved(FAMILIES["qwen3"], tmp_path, dtype))
    for name, values in tensors_of(random_model(FAMILIES["qwen3"]).to(dtype)).items():
        np.testing.assert_array_equal(checkpoint.tensor(name), values, err_msg=name)


def test_sharded_weights_are_one_checkpoint(tmp_path: Path) -> None:
    saved(FAMILIES["qwen2"], tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    checkpoint = HFCheckpoint(tmp_path)
    for name, values in tensors_of(random_model(FAMILIES["qwen2"])).items():
        np.testing.assert_array_equal(checkpoint.tensor(name), values, err_msg=name)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    saved(FAMILIES["qwen2"], tmp_path, max_shard_size="50KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelMissing, match=shard.name):
        HFCheckpoint(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 500, -1])
def test_a_cut_safetensors_file_is_corrupt(keep: int, llama: Path) -> None:
    weights = llama / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(ModelCorrupt, match="download it again"):
        HFCheckpoint(llama)


def test_rope_is_read_in_the_old_and_the_new_form(llama: Path) -> None:
    edit(llama, rope_parameters=None, rope_theta=500_000.0, rope_scaling=LLAMA3_ROPE)
    old = HFCheckpoint(llama).config
    edit(llama, rope_parameters={"rope_theta": 500_000.0, **LLAMA3_ROPE}, rope_theta=None, rope_scaling=None)
    assert HFCheckpoint(llama).config == old
    assert old.rope_theta == 500_000.0
    assert old.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 64)


def test_yarn_scales_what_is_rotated_by_its_factor_unless_the_file_says_otherwise(llama: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    edit(llama, rope_parameters=None, rope_scaling=yarn)
    found = HFCheckpoint(llama).config.rope_scaling
    assert found is not None
    assert found == RopeScaling("yarn", 4.0, original_context=64, magnitude=0.1 * math.log(4.0) + 1.0)
    edit(llama, rope_scaling=yarn | {"attention_factor": 1.0, "truncate": False})
    assert HFCheckpoint(llama).config.rope_scaling == replace(found, magnitude=1.0, truncate=False)


def test_linear_rope_scaling_is_read_with_its_first_spelling(llama: Path) -> None:
    edit(llama, rope_parameters=None, rope_scaling={"type": "linear", "factor": 2.0})
    assert HFCheckpoint(llama).config.rope_scaling == RopeScaling("linear", factor=2.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "gpt2"}, "gpt2.*llama, mistral, qwen2, qwen3"),
        ({"rope_parameters": None, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "bits 3"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "aqlm"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(change: dict[str, Any], reason: str, llama: Path) -> None:
    edit(llama, **change)
    with pytest.raises(ModelUnsupported, match=reason):
        HFCheckpoint(llama)


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1),
        Qwen2Config(**SHAPE, use_sliding_window=False, sliding_window=8, max_window_layers=0),
        Qwen3Config(
            **SHAPE,
            use_sliding_window=True,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
        ),
        MistralConfig(**SHAPE, sliding_window=None),
        LlamaConfig(**SHAPE),
    ],
)
def test_each_layer_has_the_window_it_has_in_transformers(config: PreTrainedConfig, tmp_path: Path) -> None:
    ours = HFCheckpoint(saved(config, tmp_path)).config
    theirs = [getattr(layer.self_attn, "sliding_window", None) for layer in random_model(config).model.layers]
    assert [ours.window(layer) for layer in range(2)] == theirs


def test_window_keys_left_out_of_the_file_mean_what_transformers_takes_them_for(tmp_path: Path) -> None:
    saved(Qwen2Config(**SHAPE), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["use_sliding_window"] = True
    del config["layer_types"], config["max_window_layers"], config["sliding_window"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = Qwen2Config.from_pretrained(tmp_path)
    assert HFCheckpoint(tmp_path).config.window(0) == (
        theirs.sliding_window if theirs.layer_types[0] == "sliding_attention" else None
    )


def test_attention_biases_are_announced(tmp_path: Path) -> None:
    checkpoint = HFCheckpoint(saved(LlamaConfig(**SHAPE, attention_bias=True), tmp_path))
    assert (checkpoint.config.attention_bias, checkpoint.config.output_bias) == (True, True)
    assert "model.layers.0.self_attn.o_proj.bias" in checkpoint.tensor_names()


def test_end_tokens_come_from_both_files(llama: Path) -> None:
    edit(llama, eos_token_id=2)
    edit(llama, "generation_config.json", eos_token_id=[7, 2])
    assert HFCheckpoint(llama).config.eos_token_ids == (7, 2)


def test_embeddings_are_tied_where_the_config_is_silent_and_there_is_no_head(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    del config["tie_word_embeddings"]
    (llama / "config.json").write_text(json.dumps(config))
    assert HFCheckpoint(llama).config.tied_embeddings


def test_tokenizer_files_are_found(llama: Path) -> None:
    (llama / "tokenizer.json").write_text("{}")
    edit(llama, "special_tokens_map.json", eos_token="</s>")
    templates = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    edit(llama, "tokenizer_config.json", bos_token="<s>", chat_template=templates)
    source = HFCheckpoint(llama).tokenizer_source
    assert source.tokenizer_json == llama / "tokenizer.json"
    assert (source.config["bos_token"], source.config["eos_token"]) == ("<s>", "</s>")
    assert source.chat_template == "yes"
    (llama / "chat_template.jinja").write_text("own file")
    assert HFCheckpoint(llama).tokenizer_source.chat_template == "own file"


def test_a_directory_without_tokenizer_json_says_how_to_get_one(llama: Path) -> None:
    with pytest.raises(ModelUnsupported, match="save_pretrained"):
        _ = HFCheckpoint(llama).tokenizer_source


@pytest.mark.parametrize(
    ("break_it", "error"),
    [
        (lambda directory: (directory / "config.json").unlink(), ModelMissing),
        (lambda directory: (directory / "model.safetensors").unlink(), ModelMissing),
        (lambda directory: (directory / "config.json").write_text("{"), ModelCorrupt),
        (lambda directory: (directory / "config.json").write_text('{"model_type": "llama"}'), ModelCorrupt),
    ],
)
def test_an_incomplete_directory_is_an_error_with_advice(break_it: Any, error: type[ModelError], llama: Path) -> None:
    break_it(llama)
    with pytest.raises(error, match=r"give|download|only safetensors"):
        HFCheckpoint(llama)
