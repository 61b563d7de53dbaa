from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penstock.core.errors import ModelUnsupported
from penstock.core.model_config import RopeScaling
from penstock.hub.convert import convert_to_hf, llama3_factors
from penstock.hub.gguf import GGUFCheckpoint
from penstock.hub.hf import HFCheckpoint
from penstock.hub.safetensors_file import DType
from tests.hub.families import FAMILIES, SHAPE, random_model, tensors_of, write_gguf

TOKENIZER_JSON = Tokenizer(WordLevel({"<s>": 0, "</s>": 1, "hello": 2}, unk_token="<s>")).to_str()
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def convert(gguf: Path, directory: Path, dtype: DType = "float32") -> Path:
    checkpoint = GGUFCheckpoint(gguf)
    convert_to_hf(checkpoint, directory, tokenizer_json=TOKENIZER_JSON, special_tokens=SPECIAL_TOKENS, dtype=dtype)
    return directory


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_computes_the_same_logits_after_a_trip_through_gguf(family: str, tmp_path: Path) -> None:
    original = random_model(FAMILIES[family]).eval()
    gguf = write_gguf(tmp_path / "model.gguf", FAMILIES[family], tensors_of(original))
    converted = AutoModelForCausalLM.from_pretrained(convert(gguf, tmp_path / "hf")).eval()
    assert type(converted) is type(original)
    prompt = torch.arange(40).reshape(1, -1)  # longer than the window of the one that has one
    with torch.no_grad():
        torch.testing.assert_close(converted(prompt).logits, original(prompt).logits)


def test_our_own_reader_finds_the_same_model(tmp_path: Path) -> None:
    config = FAMILIES["qwen3"]
    gguf = write_gguf(tmp_path / "model.gguf", config, tensors_of(random_model(config)))
    before, after = GGUFCheckpoint(gguf), HFCheckpoint(convert(gguf, tmp_path / "hf"))
    assert after.config == before.config
    assert after.tensor_names() == before.tensor_names()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_chosen_dtype_is_written_and_announced(dtype: DType, tmp_path: Path) -> None:
    config = FAMILIES["llama"]
    gguf = write_gguf(tmp_path / "model.gguf", config, tensors_of(random_model(config)))
    converted = AutoModelForCausalLM.from_pretrained(convert(gguf, tmp_path / "hf", dtype), dtype="auto")
    assert converted.dtype == getattr(torch, dtype)


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    config = FAMILIES["llama"]
    gguf = write_gguf(tmp_path / "model.gguf", config, tensors_of(random_model(config)))
    tokenizer = AutoTokenizer.from_pretrained(convert(gguf, tmp_path / "hf"))
    assert tokenizer("hello")["input_ids"] == [2]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.chat_template == "{{ messages }}"
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_factors_are_those_of_transformers(factor: float) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(**SHAPE, head_dim=128, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500_000.0 ** -(np.arange(0, 128, 2) / 128)
    ours = llama3_factors(RopeScaling("llama3", factor=factor), 500_000.0, 128)
    np.testing.assert_allclose(ours, plain / scaled.numpy(), rtol=1e-5)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_parameters_are_recovered_from_the_table_of_factors(factor: float, tmp_path: Path) -> None:
    config = LlamaConfig(**SHAPE, rope_theta=500_000.0)
    factors = np.array(llama3_factors(RopeScaling("llama3", factor=factor), 500_000.0, 16), np.float32)
    tensors = {**tensors_of(random_model(config)), "rope_freqs.weight": factors}
    directory = convert(write_gguf(tmp_path / "model.gguf", config, tensors), tmp_path / "hf")
    assert HFCheckpoint(directory).config.rope_scaling == RopeScaling("llama3", factor, 1.0, 4.0, 8192)


def test_factors_that_config_json_cannot_say_are_refused(tmp_path: Path) -> None:
    config = FAMILIES["llama"]
    tensors = {**tensors_of(random_model(config)), "rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)}
    with pytest.raises(ModelUnsupported, match="rope factors"):
        convert(write_gguf(tmp_path / "model.gguf", config, tensors), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
