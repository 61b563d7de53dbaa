from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.core.errors import ModelCorrupt, ModelMissing, ModelUnsupported
from penstock.hub.config_only import read_config
from tests.hub.local_hub import LocalHub

CONFIG = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def write(path: Path, **changes: object) -> str:
    path.write_text(json.dumps(CONFIG | changes))
    return str(path)


@pytest.mark.parametrize("name", ["config.json", "any.json"])
def test_a_file_is_enough(tmp_path: Path, name: str) -> None:
    assert read_config(write(tmp_path / name)).num_layers == 2


def test_a_directory_without_weights_is_enough(tmp_path: Path) -> None:
    write(tmp_path / "config.json")
    assert read_config(str(tmp_path)).hidden_size == 64


def test_of_a_repository_only_its_config_is_read(hub: LocalHub, tmp_path: Path) -> None:
    hub.files["config.json"] = json.dumps(CONFIG).encode()
    assert read_config("hf:ada/tiny").num_kv_heads == 2
    assert not hub.fetches("model.safetensors")
    assert not (tmp_path / "models").exists()


def test_a_repository_that_is_not_there_is_named(hub: LocalHub) -> None:
    hub.status = 404
    with pytest.raises(ModelMissing, match="org/other"):
        read_config("hf:org/other")


def test_a_family_with_other_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match="ernie4_5_moe"):
        read_config(write(tmp_path / "config.json", model_type="ernie4_5_moe", moe_num_experts=8))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 8), (4, 3)])
def test_heads_that_cannot_share_keys_are_named(tmp_path: Path, heads: int, kv_heads: int) -> None:
    path = write(tmp_path / "config.json", num_attention_heads=heads, num_key_value_heads=kv_heads)
    with pytest.raises(ModelCorrupt, match=f"{heads} heads of queries cannot share {kv_heads} heads of keys"):
        read_config(path)


@pytest.mark.parametrize("changes", [{"hidden_size": "64"}, {"num_hidden_layers": 0}, {"vocab_size": None}])
def test_a_size_that_is_no_size_is_named(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(ModelCorrupt, match=r"must be a positive whole number|config"):
        read_config(write(tmp_path / "config.json", **changes))
