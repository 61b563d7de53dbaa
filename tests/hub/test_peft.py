"""PEFT's files: what is read of them, and whatever makes an adapter more than we can do is refused by its name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import ModelCorrupt, ModelMissing, ModelUnsupported
from penstock.core.model_config import ModelConfig
from penstock.hub.peft import read_peft
from penstock.hub.safetensors_file import write_safetensors
from tests.model.lora import EVERY_LINEAR, write_adapter

CONFIG = ModelConfig("llama", 64, 32, 48, 2, 4, 2, 8, 64)


def change(path: Path, **config: Any) -> Path:
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return path


def test_every_linear_is_found_under_the_name_that_checkpoints_have(tmp_path: Path) -> None:
    adapter = read_peft(write_adapter(tmp_path / "a", CONFIG, rank=4, lora_alpha=6))
    assert len(adapter.layers) == CONFIG.num_layers * len(EVERY_LINEAR)
    pair = adapter.layers["model.layers.1.mlp.down_proj"]
    assert (pair.a.values.shape, pair.b.values.shape, pair.scale) == ((4, 48), (32, 4), 1.5)
    assert (adapter.rank, adapter.base) == (4, "random")


def test_scales_follow_the_patterns_as_peft_matches_them(tmp_path: Path) -> None:
    alphas = {"q_proj": 2, r"layers\.0\.mlp\.down_proj": 4, "proj": 100}  # by the whole end of a name: `proj` is none's
    adapter = read_peft(write_adapter(tmp_path / "a", CONFIG, ranks={"v_proj": 16}, alpha_pattern=alphas))
    scales = {name.removeprefix("model.layers."): each.scale for name, each in adapter.layers.items()}
    assert scales["1.self_attn.q_proj"] == 0.25
    assert (scales["0.mlp.down_proj"], scales["1.mlp.down_proj"]) == (0.5, 1.0)
    assert scales["0.self_attn.v_proj"] == 0.5
    stabilized = read_peft(write_adapter(tmp_path / "rs", CONFIG, rank=4, lora_alpha=6, use_rslora=True))
    assert {each.scale for each in stabilized.layers.values()} == {3.0}


def test_digest_names_the_content_and_not_the_place(tmp_path: Path) -> None:
    first = read_peft(write_adapter(tmp_path / "a", CONFIG))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert read_peft(tmp_path / "b").digest == first.digest
    assert read_peft(change(tmp_path / "b", base_model_name_or_path="elsewhere")).digest == first.digest
    assert read_peft(change(tmp_path / "b", lora_alpha=9)).digest != first.digest
    assert read_peft(write_adapter(tmp_path / "c", CONFIG, seed=1)).digest != first.digest


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "has DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "trained biases"),
        ({"lora_bias": True}, "lora_bias"),
        ({"peft_type": "IA3"}, "is a IA3 adapter"),
        ({"peft_type": None}, "is a nameless adapter"),
        ({"init_lora_weights": "pissa_niter_4"}, "began as pissa_niter_4"),
        ({"layer_replication": [[0, 1]]}, "repeated layers"),
        ({"trainable_token_indices": [3]}, "tokens of its own"),
    ],
)
def test_what_is_more_than_pairs_of_matrices_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    path = change(write_adapter(tmp_path / "a", CONFIG), **config)
    with pytest.raises(ModelUnsupported, match=reason):
        read_peft(path)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        ("base_model.model.model.embed_tokens.lora_embedding_A", "adapted embeddings"),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector.weight", "DoRA"),
        ("base_model.model.lm_head.weight", "saved whole"),
    ],
)
def test_tensors_that_are_no_pair_are_refused(tmp_path: Path, tensor: str, reason: str) -> None:
    path = write_adapter(tmp_path / "a", CONFIG)
    write_safetensors(path / "adapter_model.safetensors", [(tensor, np.ones((2, 2), np.float32))], 1, "float32")
    with pytest.raises(ModelUnsupported, match=reason):
        read_peft(path)


def test_rank_above_the_most_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match="rank 257; the most is 256"):
        read_peft(write_adapter(tmp_path / "a", CONFIG, rank=257, targets=("q_proj",)))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"r": 9}, "has rank 8, and adapter_config.json says 9"),
        ({"lora_alpha": "much"}, "lora_alpha of .* cannot be read"),
        ({"alpha_pattern": {"(": 1}}, "lora_alpha of .* cannot be read"),
        ({"rank_pattern": {"(([a-z_]+)+.)+!": 8}}, "r of .* cannot be read: the pattern"),  # would take for ever
        ({"rank_pattern": ["q_proj"]}, "r of .* cannot be read"),
        ({"lora_alpha": float("inf")}, "is inf"),
    ],
)
def test_config_that_does_not_fit_is_told(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    path = change(write_adapter(tmp_path / "a", CONFIG), **config)
    with pytest.raises(ModelCorrupt, match=reason):
        read_peft(path)


def test_half_a_pair_is_told(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", CONFIG)
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    write_safetensors(path / "adapter_model.safetensors", [(name, np.ones((8, 32), np.float32))], 1, "float32")
    with pytest.raises(ModelCorrupt, match="has lora_A and not the other"):
        read_peft(path)


def test_missing_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match="there is no adapter directory"):
        read_peft(tmp_path / "nowhere")
    with pytest.raises(ModelMissing, match=r"has no adapter_config\.json"):
        read_peft(tmp_path)
    path = write_adapter(tmp_path / "a", CONFIG)
    (path / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelMissing, match="only safetensors"):
        read_peft(path)
