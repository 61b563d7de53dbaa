from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.core.errors import ModelMissing
from penstock.hub.hf import HFCheckpoint
from penstock.hub.hf_directory import HFDirectory
from penstock.hub.resolve import describe
from tests.hub.families import FAMILIES, random_model

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", FAMILIES)
def test_without_weights_a_model_is_described_as_with_them(tmp_path: Path, family: str) -> None:
    random_model(FAMILIES[family]).save_pretrained(tmp_path)
    whole = HFCheckpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    described = describe(str(tmp_path))
    assert isinstance(described, HFDirectory)
    assert described.config == whole.config


def test_a_config_of_fp8_weights_says_so(tmp_path: Path) -> None:
    random_model(FAMILIES["llama"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fbgemm_fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert HFDirectory(tmp_path).config.quantization == "fp8"


def test_an_empty_directory_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match=r"no config\.json"):
        _ = HFDirectory(tmp_path).config
