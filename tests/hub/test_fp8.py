from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from penstock.core.errors import ModelUnsupported
from penstock.hub.convert import convert_to_hf
from penstock.hub.hf import HFCheckpoint
from tests.hub.fp8_checkpoints import (
    FP8,
    LAYOUTS,
    LLAMA,
    PER_ROW,
    PER_TENSOR,
    PER_TOKEN,
    Layout,
    compressed_tensors,
    edit_config,
    edit_tensor,
    write_fp8,
)

UP = "model.layers.1.mlp.up_proj.weight"
STATIC, DYNAMIC = LAYOUTS["fp8, static"], LAYOUTS["fp8, dynamic"]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_gives_the_weights_it_was_made_from(layout: Layout, tmp_path: Path) -> None:
    expected = write_fp8(tmp_path, layout)
    checkpoint = HFCheckpoint(tmp_path)
    assert checkpoint.config.quantization == "fp8"
    assert checkpoint.tensor_names() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), values.numpy(), err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_weights_stay_in_the_type_they_are_stored_in(layout: Layout, tmp_path: Path) -> None:
    write_fp8(tmp_path, layout)
    checkpoint = HFCheckpoint(tmp_path)
    stored = checkpoint.stored(UP)
    assert (stored.format, stored.values.dtype, stored.values.flags.writeable) == ("F8_E4M3", np.uint8, False)
    assert stored.scales is not None
    assert (stored.scales.shape, stored.scales.dtype) == ((96,), np.float32)
    assert (stored.input_scale is not None) == layout.is_static
    assert checkpoint.stored("lm_head.weight").format == "BF16"


def test_a_converted_fp8_checkpoint_computes_the_same_in_transformers(tmp_path: Path) -> None:
    expected = write_fp8(tmp_path / "fp8", DYNAMIC)
    (tmp_path / "fp8" / "tokenizer.json").write_text("{}")
    checkpoint = HFCheckpoint(tmp_path / "fp8")
    convert_to_hf(checkpoint, tmp_path / "hf", tokenizer_json="{}", special_tokens={})
    converted = LlamaForCausalLM.from_pretrained(tmp_path / "hf").eval()
    original = LlamaForCausalLM(LLAMA).eval()
    original.load_state_dict(expected)
    prompt = torch.arange(20).reshape(1, -1)
    with torch.no_grad():
        torch.testing.assert_close(converted(prompt).logits, original(prompt).logits)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("k_scale", "v_scale"), (0.25, 0.5)),
        (("k_proj__output_scale", "v_proj__output_scale"), (0.25, 0.5)),
        (("kv_scale",), (0.25, 0.25)),
    ],
)
def test_scales_of_the_cache_are_found_under_all_their_names(
    names: tuple[str, ...], expected: tuple[float, float], tmp_path: Path
) -> None:
    scales = [torch.tensor([0.25]), torch.tensor([0.5])]
    write_fp8(tmp_path, DYNAMIC, **{f"model__layers__1__self_attn__{name}": scales[i] for i, name in enumerate(names)})
    checkpoint = HFCheckpoint(tmp_path)
    assert checkpoint.kv_scales(0) == (1.0, 1.0)
    assert checkpoint.kv_scales(1) == expected


def test_a_scale_of_the_cache_per_head_is_refused(tmp_path: Path) -> None:
    scales = {f"model__layers__0__self_attn__{name}_scale": torch.ones(2) for name in "kv"}
    write_fp8(tmp_path, DYNAMIC, **scales)
    with pytest.raises(ModelUnsupported, match=r"k_scale .* is \[2\], not a single number"):
        HFCheckpoint(tmp_path).kv_scales(0)


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for tests that each write the `quantization_config` that is refused."""
    path = tmp_path_factory.mktemp("refused")
    write_fp8(path, DYNAMIC)
    return path


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
        ({"quant_method": "awq", "bits": 4}, "'awq'"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "'modelopt'"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, "_scale_inv"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e5m2"}, "'e5m2'"),
        ({"quant_method": "fp8"}, "activation_scheme None"),
        (compressed_tensors({**PER_ROW, "num_bits": 4}, PER_TOKEN), "weights with num_bits 4"),
        (compressed_tensors({**PER_ROW, "type": "int"}, PER_TOKEN), "weights with type 'int'"),
        (compressed_tensors({**PER_ROW, "symmetric": False}, PER_TOKEN), "symmetric False"),
        (compressed_tensors({**PER_ROW, "strategy": "group"}, PER_TOKEN), "weights with strategy 'group'"),
        (compressed_tensors({**PER_ROW, "strategy": "block"}, PER_TOKEN), "weights with strategy 'block'"),
        (compressed_tensors(PER_ROW, {**PER_TOKEN, "strategy": "group"}), "input_activations with strategy 'group'"),
        (compressed_tensors(PER_ROW, {**PER_TENSOR, "strategy": "token"}), "input_activations with strategy 'token'"),
        (compressed_tensors(PER_ROW, None), "input_activations with num_bits None"),
        (compressed_tensors(PER_ROW, PER_TOKEN, format="pack-quantized"), "weights with type 'float'"),
        (compressed_tensors(PER_ROW, PER_TOKEN, format="nvfp4-pack-quantized"), "'nvfp4-pack-quantized'"),
        (compressed_tensors(PER_ROW, PER_TOKEN, config_groups={}), "config_groups"),
        (compressed_tensors(PER_ROW, PER_TOKEN, sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask"),
        (compressed_tensors(PER_ROW, PER_TOKEN, transform_config={"config_groups": {"R1": {}}}), "transform_config"),
        (compressed_tensors(PER_ROW, PER_TOKEN, kv_cache_scheme={**FP8, "type": "int"}), "kv_cache_scheme"),
        (compressed_tensors(PER_ROW, PER_TOKEN, kv_cache_scheme={**FP8, "strategy": "attn_head"}), "'attn_head'"),
    ],
)
def test_other_quantizations_are_refused_by_name(quantization: dict[str, Any], reason: str, refused: Path) -> None:
    edit_config(refused, quantization_config=quantization)
    with pytest.raises(ModelUnsupported, match=f"not supported: .*{reason}"):
        HFCheckpoint(refused)


@pytest.mark.parametrize(
    ("layout", "name", "tensor", "reason"),
    [
        (DYNAMIC, f"{UP}_scale", None, "without .*up_proj.weight_scale"),
        (DYNAMIC, f"{UP}_scale", torch.ones(96, 4), r"up_proj.weight_scale of shape \[96, 4\]"),
        (DYNAMIC, f"{UP}_scale", torch.ones(8, 12), r"shape \[8, 12\]"),
        (DYNAMIC, UP, torch.zeros(96, 64).to(torch.float8_e5m2), "up_proj.weight is F8_E5M2"),
        (STATIC, UP.replace("weight", "input_scale"), None, "without .*up_proj.input_scale"),
        (STATIC, UP.replace("weight", "input_scale"), torch.ones(64), r"input_scale of shape \[64\]"),
    ],
)
def test_scales_that_cannot_be_used_are_refused_by_name(
    layout: Layout, name: str, tensor: torch.Tensor | None, reason: str, tmp_path: Path
) -> None:
    write_fp8(tmp_path, layout)
    edit_tensor(tmp_path, name, tensor)
    with pytest.raises(ModelUnsupported, match=f"not supported: .*{reason}"):
        HFCheckpoint(tmp_path)


def test_blockwise_scales_are_recognised(tmp_path: Path) -> None:
    write_fp8(tmp_path, DYNAMIC)
    edit_tensor(tmp_path, f"{UP}_scale", None)
    edit_tensor(tmp_path, f"{UP}_scale_inv", torch.ones(1, 1))
    with pytest.raises(ModelUnsupported, match="weight_scale_inv, for blocks"):
        HFCheckpoint(tmp_path)


def test_fp8_weights_that_the_config_does_not_mention_are_refused(tmp_path: Path) -> None:
    write_fp8(tmp_path, DYNAMIC)
    edit_config(tmp_path, quantization_config=None)
    with pytest.raises(ModelUnsupported, match="no quantization_config"):
        HFCheckpoint(tmp_path)
