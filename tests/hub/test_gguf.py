from __future__ import annotations

import contextlib
import functools
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from penstock.core.errors import ModelCorrupt, ModelMissing, ModelUnsupported
from penstock.core.model_config import RopeScaling
from penstock.hub.convert import hf_config
from penstock.hub.gguf import GGUFCheckpoint
from penstock.hub.progress import silent
from penstock.hub.sources import pull
from tests.hub.families import FAMILIES, random_model, tensors_of, write_gguf

pytestmark = pytest.mark.slow


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    config = FAMILIES["llama"]
    return write_gguf(tmp_path / "llama.gguf", config, tensors_of(random_model(config)))


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_come_back_as_transformers_has_them(family: str, tmp_path: Path) -> None:
    config = FAMILIES[family]
    expected = tensors_of(random_model(config))
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "model.gguf", config, expected))
    assert checkpoint.tensor_names() == expected.keys()
    for name, values in expected.items():
        found = checkpoint.tensor(name)
        assert found.dtype == np.float32
        assert found.flags.c_contiguous
        np.testing.assert_array_equal(found, values, err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_config_says_what_transformers_said(family: str, tmp_path: Path) -> None:
    theirs = FAMILIES[family]
    ours = GGUFCheckpoint(write_gguf(tmp_path / "model.gguf", theirs, tensors_of(random_model(theirs)))).config
    assert ours.architecture == family
    assert (ours.vocab_size, ours.hidden_size, ours.intermediate_size) == (96, 64, 96)
    assert (ours.num_layers, ours.num_heads, ours.num_kv_heads) == (2, 4, 2)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.context_length == 256
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    assert ours.attention_bias == (family == "qwen2")
    assert not ours.output_bias
    assert ours.windows == ((16, 16) if family == "mistral" else ())
    assert (ours.bos_token_id, ours.eos_token_ids) == (1, (2,))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_weights_are_dequantized_row_by_row(kind: str, tmp_path: Path) -> None:
    config = FAMILIES["llama"]
    tensors = tensors_of(random_model(config))
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "model.gguf", config, tensors, kind))
    type = gguf.GGMLQuantizationType[kind]
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        expected = gguf.quants.dequantize(gguf.quants.quantize(tensors[name], type), type)
        np.testing.assert_array_equal(checkpoint.tensor(name), expected)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ4_NL", "IQ3_S", "IQ2_XS"])
def test_every_block_of_a_tensor_larger_than_a_chunk_is_dequantized(kind: str, tmp_path: Path) -> None:
    type = gguf.GGMLQuantizationType[kind]
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[type]
    rows, columns = 600, 512
    raw = np.random.default_rng(0).integers(0, 60, (rows, columns // block_values * block_bytes), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for key in ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"):
        writer.add_uint32(f"llama.{key}", 1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=type)
    writer.add_tensor("output_norm.weight", np.ones(columns, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = GGUFCheckpoint(tmp_path / "model.gguf").tensor("model.embed_tokens.weight")
    np.testing.assert_array_equal(found, gguf.quants.dequantize(raw, type))
    assert found.shape == (rows, columns)


def test_llama3_rope_factors_become_the_scaling(tmp_path: Path) -> None:
    config = FAMILIES["llama"]
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    tensors = {**tensors_of(random_model(config)), "rope_freqs.weight": factors}
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "model.gguf", config, tensors))
    assert checkpoint.config.rope_scaling == RopeScaling("factors", factors=tuple(factors.tolist()))
    assert "rope_freqs.weight" not in checkpoint.tensor_names()


@pytest.mark.parametrize(
    "metadata",
    [
        {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0},
        {"llama__rope__scale_linear": 4.0},
    ],
)
def test_linear_rope_scaling_is_read_in_both_spellings(metadata: dict[str, float | str], tmp_path: Path) -> None:
    config = FAMILIES["llama"]
    path = write_gguf(tmp_path / "model.gguf", config, tensors_of(random_model(config)), "F32", **metadata)
    assert GGUFCheckpoint(path).config.rope_scaling == RopeScaling("linear", factor=4.0)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0}, "yarn"),
        ({"llama__expert_count": 8}, "mixture of experts"),
        ({"llama__rope__dimension_count": 8}, "rope.dimension_count"),
        ({"split__count": 2}, "merge"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(metadata: dict[str, float | str], reason: str, tmp_path: Path) -> None:
    config = FAMILIES["llama"]
    path = write_gguf(tmp_path / "model.gguf", config, tensors_of(random_model(config)), "F32", **metadata)
    with pytest.raises(ModelUnsupported, match=reason):
        GGUFCheckpoint(path)


def test_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    config = FAMILIES["llama"]
    tensors = {**tensors_of(random_model(config)), "model.layers.0.mlp.up_proj.bias": np.ones(96, np.float32)}
    with pytest.raises(ModelUnsupported, match=r"blk\.0\.ffn_up\.bias"):
        GGUFCheckpoint(write_gguf(tmp_path / "model.gguf", config, tensors))


def test_an_unknown_architecture_is_refused_and_the_known_ones_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelUnsupported, match=r"mamba.*llama, qwen2, qwen3"):
        GGUFCheckpoint(tmp_path / "model.gguf")


def test_all_tokens_that_end_a_turn_are_found_once(tmp_path: Path) -> None:
    config = FAMILIES["qwen2"]
    metadata: dict[str, float | str] = {"tokenizer__ggml__eot_token_id": 9, "tokenizer__ggml__eom_token_id": 2}
    path = write_gguf(tmp_path / "model.gguf", config, tensors_of(random_model(config)), "F32", **metadata)
    assert GGUFCheckpoint(path).config.eos_token_ids == (2, 9)


def test_tokenizer_metadata_is_plain_python(llama: Path) -> None:
    source = GGUFCheckpoint(llama).tokenizer_source
    assert source.metadata["tokenizer.ggml.tokens"][7] == "token7é"
    assert source.metadata["tokenizer.ggml.token_type"][:3] == [1, 1, 1]
    assert source.metadata["tokenizer.ggml.eos_token_id"] == 2
    assert source.chat_template == "{{ messages }}"


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match="No such file"):
        GGUFCheckpoint(tmp_path / "nothing.gguf")


@pytest.mark.parametrize("content", [b"", b"GG", b"<html>not found</html>" * 100])
def test_a_file_that_is_not_a_gguf_says_so(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ModelCorrupt, match="not a GGUF"):
        GGUFCheckpoint(tmp_path / "model.gguf")


def test_a_file_cut_anywhere_is_corrupt(llama: Path) -> None:
    size = llama.stat().st_size
    for keep in [*range(4, 4000, 97), size // 2, size - 40]:
        cut = llama.with_name("cut.gguf")
        cut.write_bytes(llama.read_bytes()[:keep])
        with pytest.raises(ModelCorrupt, match="download it again"):
            GGUFCheckpoint(cut)


def test_garbage_in_the_header_never_ends_in_a_foreign_exception(llama: Path) -> None:
    good = llama.read_bytes()
    random = np.random.default_rng(0)
    for _ in range(200):
        damaged = bytearray(good)
        for at in random.integers(4, 3000, 4):
            damaged[at] = random.integers(256)
        bad = llama.with_name("bad.gguf")
        bad.write_bytes(damaged)
        with contextlib.suppress(ModelCorrupt, ModelUnsupported):
            GGUFCheckpoint(bad)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return pull("smollm2", progress=silent)


@pytest.mark.drill
def test_smollm2_starts_quickly(smollm2: Path) -> None:
    started = time.process_time()
    checkpoint = GGUFCheckpoint(smollm2)
    assert len(checkpoint.tokenizer_source.metadata["tokenizer.ggml.tokens"]) == checkpoint.config.vocab_size == 49152
    assert time.process_time() - started < 0.5


def test_smollm2_is_what_transformers_makes_of_the_same_file(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = GGUFCheckpoint(smollm2)
    assert len(ours.tokenizer_source.metadata["tokenizer.ggml.tokens"]) == ours.config.vocab_size == 49152
    # Transformers makes this map anew for each module of the model, and it is the same each time.
    monkeypatch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(LlamaConfig(**hf_config(ours.config, "float32")))
    theirs = load_gguf_checkpoint(smollm2, return_tensors=True, model_to_load=skeleton)
    assert ours.tensor_names() == theirs["tensors"].keys()
    for name, values in theirs["tensors"].items():
        np.testing.assert_array_equal(ours.tensor(name), values.numpy(), err_msg=name)
    assert ours.config.rope_theta == theirs["config"]["rope_theta"]
    assert ours.config.num_kv_heads == theirs["config"]["num_key_value_heads"]
    assert ours.config.tied_embeddings == theirs["config"]["tie_word_embeddings"]
