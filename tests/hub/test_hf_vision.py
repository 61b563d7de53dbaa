"""Directories of models that take images: the config, and tensors by their names in older and newer files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.core.errors import ModelCorrupt, ModelUnsupported
from penstock.core.model_config import VisionConfig
from penstock.hub.hf import HFCheckpoint
from penstock.model.random_weights import RandomCheckpoint
from tests.model.tiny_vision import CONFIGS, VisionCheckpoint, hf_vision_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vision")
    for name in CONFIGS:
        hf_vision_model(name).save_pretrained(directory / name)
    return directory


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_saved_model_is_read_with_its_encoder(saved: Path, name: str) -> None:
    ours, expected = HFCheckpoint(saved / name), VisionCheckpoint(hf_vision_model(name))
    assert ours.config.vision is not None
    assert ours.config == replace(expected.config, eos_token_ids=ours.config.eos_token_ids)
    missing = expected.tensor_names() - ours.tensor_names()
    assert missing == ({"lm_head.weight"} if ours.config.tied_embeddings else set())
    for tensor in ours.tensor_names():
        np.testing.assert_array_equal(ours.tensor(tensor), expected.tensor(tensor))


@pytest.mark.parametrize("name", list(CONFIGS))
def test_random_weights_have_the_shapes_of_real_ones(saved: Path, name: str) -> None:
    real = HFCheckpoint(saved / name)
    random = RandomCheckpoint(real.config)
    for tensor in real.tensor_names():
        assert random.tensor(tensor).shape == real.tensor(tensor).shape, tensor


def test_older_files_of_qwen_have_the_decoder_beside_the_rest(saved: Path, tmp_path: Path) -> None:
    newer = saved / "qwen2.5-vl"
    tensors = load_file(newer / "model.safetensors")
    older = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): values
        for name, values in tensors.items()
    }
    save_file(older, tmp_path / "model.safetensors")
    config = json.loads((newer / "config.json").read_text())
    inner = config.pop("text_config")
    rope = inner.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    flat = {**inner, **config, "rope_scaling": scaling, "rope_theta": rope["rope_theta"]}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    assert HFCheckpoint(tmp_path).config == HFCheckpoint(newer).config
    assert HFCheckpoint(tmp_path).tensor_names() == HFCheckpoint(newer).tensor_names()


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("smolvlm", {"hidden_act": "relu"}, ModelUnsupported),
        ("smolvlm", {"image_size": 20, "patch_size": 7}, ModelCorrupt),
        ("smolvlm", {"num_attention_heads": 5}, ModelCorrupt),
        ("smolvlm", {"patch_size": "4"}, ModelCorrupt),
        ("qwen2.5-vl", {"hidden_act": "gelu"}, ModelUnsupported),
        ("qwen2.5-vl", {"window_size": 4}, ModelCorrupt),
        ("qwen2.5-vl", {"fullatt_block_indexes": 7}, ModelCorrupt),
        ("qwen3-vl", {"hidden_act": "silu"}, ModelUnsupported),
        ("qwen3-vl", {"num_position_embeddings": 0}, ModelCorrupt),
        ("qwen3-vl", {"deepstack_visual_indexes": [1, 4]}, ModelCorrupt),
        ("qwen3-vl", {"deepstack_visual_indexes": [1, 1]}, ModelCorrupt),
        ("qwen3-vl", {"num_heads": 16}, ModelCorrupt),
    ],
)
def test_an_encoder_that_would_be_silently_wrong_is_refused(
    saved: Path, tmp_path: Path, name: str, change: dict[str, Any], error: type[Exception]
) -> None:
    config = json.loads((saved / name / "config.json").read_text())
    config["vision_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(saved / name / "model.safetensors")
    with pytest.raises(error):
        HFCheckpoint(tmp_path)


def test_parameters_are_counted_as_there_are(saved: Path) -> None:
    """But for norms and biases."""
    for name in CONFIGS:
        checkpoint = HFCheckpoint(saved / name)
        vision = checkpoint.config.vision
        assert isinstance(vision, VisionConfig)
        tensors = [t for t in checkpoint.tensor_names() if t.startswith(("vision.", "connector."))]
        real = sum(checkpoint.tensor(t).size for t in tensors if checkpoint.tensor(t).ndim > 1)
        assert vision.num_parameters(checkpoint.config.hidden_size) == real
