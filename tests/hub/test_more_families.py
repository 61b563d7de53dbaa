"""Gemma, Phi and mixtures of experts, from both formats: the same model, by llama.cpp's names and by Hugging Face's."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM

from penstock.core.errors import ModelUnsupported
from penstock.core.model_config import ModelConfig, RopeScaling
from penstock.hub.convert import convert_to_hf
from penstock.hub.gguf import GGUFCheckpoint
from penstock.hub.hf import HFCheckpoint
from tests.hub.more_families import MORE, saved, write_gguf

TOKENIZER_JSON = Tokenizer(WordLevel({"<s>": 0}, unk_token="<s>")).to_str()


def assert_same(ours: ModelConfig, theirs: ModelConfig) -> None:
    """Numbers in a GGUF are of 32 bits."""
    for field in fields(ModelConfig):
        one, other = getattr(ours, field.name), getattr(theirs, field.name)
        if isinstance(one, RopeScaling) and isinstance(other, RopeScaling):
            assert replace(one, magnitude=1.0) == replace(other, magnitude=1.0)
            one, other = one.magnitude, other.magnitude
        assert one == (pytest.approx(other) if isinstance(other, float) else other), field.name


@pytest.mark.parametrize("name", MORE)
def test_both_formats_hold_the_same_model(name: str, tmp_path: Path) -> None:
    directory, tensors = saved(name, tmp_path / "hf")
    theirs = HFCheckpoint(directory)
    ours = GGUFCheckpoint(write_gguf(tmp_path / "model.gguf", MORE[name], tensors))
    assert ours.config.architecture == MORE[name].model_type
    assert ours.tensor_names() == theirs.tensor_names() == tensors.keys()
    for tensor, values in tensors.items():
        found = ours.tensor(tensor)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, values, atol=2e-7, err_msg=tensor)  # norms: one was added and taken away
    ends = {"gemma2": (2, 5), "gemma3_text": (2, 5), "phi3": (2, 6, 7)}.get(MORE[name].model_type, (2,))
    assert ours.config.eos_token_ids == ends
    special = {"eos_token_ids": (), "bos_token_id": None, "quantization": None}
    assert_same(replace(ours.config, **special), replace(theirs.config, **special))


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "phi3"])
def test_integers_of_each_expert_stay_integers(name: str, tmp_path: Path) -> None:
    _, tensors = saved(name, tmp_path)
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "model.gguf", MORE[name], tensors, "Q8_0"))
    assert checkpoint.config.quantization == "int8"
    for tensor, values in tensors.items():
        if values.ndim == 2 and "shared_expert_gate" not in tensor:
            stored = checkpoint.stored(tensor)
            assert stored.scales is not None, tensor
            np.testing.assert_array_equal(stored.widened(), checkpoint.tensor(tensor))
            np.testing.assert_allclose(stored.widened(), values, atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_transformers_computes_the_same_logits_after_a_trip_through_gguf(name: str, tmp_path: Path) -> None:
    directory, tensors = saved(name, tmp_path / "hf")
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "model.gguf", MORE[name], tensors))
    convert_to_hf(checkpoint, tmp_path / "back", tokenizer_json=TOKENIZER_JSON, special_tokens={}, dtype="float32")
    original, converted = (
        AutoModelForCausalLM.from_pretrained(each, attn_implementation="eager").eval()
        for each in (directory, tmp_path / "back")
    )
    assert type(converted) is type(original)
    prompt = torch.arange(40).reshape(1, -1)  # longer than the window of those that have one
    with torch.no_grad():
        torch.testing.assert_close(converted(prompt).logits, original(prompt).logits, atol=2e-5, rtol=1e-4)
    assert HFCheckpoint(tmp_path / "back").config == checkpoint.config


@pytest.mark.parametrize("prefixes", [("language_model.model.", "language_model."), ("model.language_model.", "")])
def test_of_a_gemma_that_sees_only_the_part_that_speaks_is_read(prefixes: tuple[str, str], tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    directory, tensors = saved("gemma3_text", tmp_path)
    plain = HFCheckpoint(directory).config
    inner, _ = prefixes
    renamed = {inner + name.removeprefix("model."): values for name, values in tensors.items()}
    beside = {"vision_tower.vision_model.embeddings.weight": np.ones((2, 2), np.float32)}
    save_file(renamed | beside, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    outer = {"model_type": "gemma3", "text_config": config, "vision_config": {}, "eos_token_id": [1, 106]}
    (directory / "config.json").write_text(json.dumps(outer))
    (directory / "generation_config.json").unlink()
    checkpoint = HFCheckpoint(directory)
    assert checkpoint.config == replace(plain, eos_token_ids=(1, 106))
    assert checkpoint.tensor_names() == tensors.keys()
    for name, values in tensors.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), values)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("gemma2", {"hidden_activation": "gelu"}, "gelu"),
        ("gemma2", {"use_bidirectional_attention": True}, "bidirectional"),
        ("gemma3_text", {"attention_bias": True}, "attention_bias"),
        ("qwen2_moe", {"use_sliding_window": True}, "sliding"),
        ("qwen2_moe", {"qkv_bias": False}, "qkv_bias"),
        ("mixtral", {"hidden_act": "gelu_pytorch_tanh"}, "activation"),
        ("phi3", {"rope_parameters": None, "rope_scaling": {"type": "llama4", "factor": 2.0}}, "llama4"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(
    name: str, change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    directory, _ = saved(name, tmp_path)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelUnsupported, match=reason):
        HFCheckpoint(directory)


def test_experts_that_are_weighed_otherwise_are_refused(tmp_path: Path) -> None:
    import gguf

    _, tensors = saved("mixtral", tmp_path)
    add = gguf.GGUFWriter.add_expert_used_count

    def with_sigmoid(writer: gguf.GGUFWriter, count: int) -> None:
        add(writer, count)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_expert_used_count", with_sigmoid)
        path = write_gguf(tmp_path / "model.gguf", MORE["mixtral"], tensors)
    with pytest.raises(ModelUnsupported, match="weighed"):
        GGUFCheckpoint(path)
