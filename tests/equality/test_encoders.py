"""Vectors are those that transformers makes of the same weights, alone or in any batch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, BertConfig, RobertaConfig

from penstock.cli.before_serving import check
from penstock.core.errors import ConfigError, ModelUnsupported
from penstock.core.settings import EngineSettings, Settings
from penstock.hub.encoder import EncoderCheckpoint
from penstock.hub.resolve import resolve
from penstock.model import encoder
from penstock.runner.embedder import encoder_embedder
from penstock.text.tokenizer import Tokenizer
from tests.devices import NEEDS_GPU

SHAPE: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 66,
}
CONFIGS: dict[str, Any] = {
    "bert": BertConfig(**SHAPE, pad_token_id=0),
    "roberta": RobertaConfig(**SHAPE, pad_token_id=1, type_vocab_size=1),
}
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
TOLERANCE = {"cpu": 2e-6, "cuda": 2e-5}
rng = np.random.default_rng(4)
TEXTS = [rng.integers(2, 120, length).tolist() for length in (1, 5, 17, 5, 64, 2)]


def embed(checkpoint: EncoderCheckpoint, texts: list[list[int]], device: str = "cpu") -> torch.Tensor:
    found = encoder_embedder(checkpoint, torch.device(device)).embed(texts)
    return torch.from_numpy(np.frombuffer(b"".join(found), np.float32).copy()).view(len(texts), -1)


def theirs(model: Any, texts: list[list[int]], pooling: str) -> torch.Tensor:
    rows = []
    with torch.inference_mode():
        for text in texts:
            states = model(torch.tensor([text])).last_hidden_state[0]
            rows.append({"mean": states.mean(dim=0), "first": states[0], "last": states[-1]}[pooling])
    return torch.nn.functional.normalize(torch.stack(rows), dim=1)


def saved(family: str, path: Path) -> Any:
    torch.manual_seed(1)
    model = AutoModel.from_config(CONFIGS[family]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return model


@DEVICES
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_random_models_of_each_family(family: str, pooling: str, device: str, tmp_path: Path) -> None:
    model = saved(family, tmp_path)
    modes = {"mean": "pooling_mode_mean_tokens", "first": "pooling_mode_cls_token", "last": "pooling_mode_lasttoken"}
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps({mode: name == pooling for name, mode in modes.items()}))
    checkpoint = EncoderCheckpoint(tmp_path)
    assert checkpoint.config.context_length == (66 if family == "bert" else 64)
    expected = theirs(model, TEXTS, pooling)
    tolerance = TOLERANCE[device]
    torch.testing.assert_close(embed(checkpoint, TEXTS, device), expected, atol=tolerance, rtol=0)
    for text, row in zip(TEXTS, expected, strict=True):
        torch.testing.assert_close(embed(checkpoint, [text], device)[0], row, atol=tolerance, rtol=0)


@DEVICES
def test_texts_of_about_one_length_do_not_see_each_other(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved("bert", tmp_path)
    checkpoint = EncoderCheckpoint(tmp_path)
    expected = embed(checkpoint, TEXTS)
    monkeypatch.setitem(encoder._GROUP_STEP, device, 32)
    torch.testing.assert_close(embed(checkpoint, TEXTS, device), expected, atol=TOLERANCE[device], rtol=0)


@pytest.mark.parametrize("asked", ["tp", "pp", "ep", "sp"])
def test_ranks_that_it_cannot_have_are_refused_by_name(asked: str, tmp_path: Path) -> None:
    saved("bert", tmp_path)
    settings = Settings(model=str(tmp_path), engine=EngineSettings(tp=1))
    check(settings)
    with pytest.raises(
        ConfigError, match=f"{asked} is 2, and a model that makes vectors alone has one rank"
    ) as refused:
        check(replace(settings, engine=replace(settings.engine, **{asked: 2})))
    assert refused.value.param == asked


@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_less_than_float32_is_nearly_the_same(dtype: torch.dtype, tmp_path: Path) -> None:
    saved("bert", tmp_path)
    checkpoint = EncoderCheckpoint(tmp_path)
    rows = encoder_embedder(checkpoint, torch.device("cuda"), dtype=dtype).embed(TEXTS)
    found = torch.from_numpy(np.frombuffer(b"".join(rows), np.float32).copy()).view(len(TEXTS), -1)
    assert ((found * embed(checkpoint, TEXTS)).sum(dim=1) > 0.999).all()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"is_decoder": True}, "is_decoder"),
        ({"position_embedding_type": "relative_key"}, "position"),
    ],
)
def test_other_mathematics_is_refused(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    AutoModel.from_config(CONFIGS["bert"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelUnsupported, match=problem):
        EncoderCheckpoint(tmp_path)


def test_a_pooling_that_is_not_known_is_refused(tmp_path: Path) -> None:
    AutoModel.from_config(CONFIGS["bert"]).save_pretrained(tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(ModelUnsupported, match="pooling_mode_max_tokens"):
        _ = EncoderCheckpoint(tmp_path).pooling


@pytest.mark.slow
def test_the_real_minilm() -> None:
    """The published model, by its own tokenizer; and the first numbers that its authors print for this sentence."""
    checkpoint = resolve("minilm")
    assert isinstance(checkpoint, EncoderCheckpoint)
    assert (checkpoint.pooling, checkpoint.config.context_length) == ("mean", 256)
    tokenizer = Tokenizer.load(checkpoint.tokenizer_source)
    sentences = ["This is an example sentence", "Each sentence is converted", "short", "A long one. " * 50]
    texts = tokenizer.encode_batch(sentences, add_special_tokens=True)
    assert texts[0][0] == 101
    assert texts[0][-1] == 102
    found = embed(checkpoint, texts)
    assert found[0, :3].tolist() == pytest.approx([0.0676569, 0.0634959, 0.0487131], abs=2e-6)
    model = AutoModel.from_pretrained(checkpoint.path).eval()
    torch.testing.assert_close(found, theirs(model, texts, "mean"), atol=1e-6, rtol=0)
