from __future__ import annotations

import gc
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.hub.checkpoint import Checkpoint
from penstock.hub.hf import HFCheckpoint
from penstock.model.loading import load_model
from penstock.model.ops import Linear, Ops
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.native import NativeOps
from penstock.model.ops.reference import ReferenceOps
from penstock.model.quantized import Weight
from penstock.model.quantized.fp8 import Fp8Weight
from penstock.model.shard import Split
from penstock.model.weights import Weights, read_stored
from tests.hub.families import FAMILIES, random_model
from tests.hub.fp8_checkpoints import LAYOUTS, Layout, edit_tensor, write_fp8
from tests.model.paged import PagedDriver
from tests.model.tiny import ArrayCheckpoint

QKV = {"q_proj": 64, "k_proj": 32, "v_proj": 32}
STATIC, DYNAMIC = LAYOUTS["fp8, static"], LAYOUTS["fp8, dynamic"]


class PackingOps(ReferenceOps):
    """Keeps what it was given to pack."""

    def __init__(self) -> None:
        super().__init__()
        self.packed: list[Weight] = []

    def linear(self, weight: Weight, bias: Tensor | None = None, *, precise: bool = True) -> Linear:
        self.packed.append(weight)
        return super().linear(weight, bias, precise=precise)


def weights_of(checkpoint: Checkpoint, ops: Ops) -> Weights:
    return Weights(checkpoint, partial(read_stored, checkpoint), ops, checkpoint.tensor_names())


def packed_qkv(directory: Path) -> Weight:
    ops = PackingOps()
    weights_of(HFCheckpoint(directory), ops).at("model.layers.0.self_attn").linear(QKV, 64, split=Split.NONE)
    return ops.packed[0]


def qkv_of(expected: dict[str, Tensor]) -> Tensor:
    return torch.cat([expected[f"model.layers.0.self_attn.{name}.weight"] for name in QKV])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tensor_keeps_the_type_it_is_stored_in(dtype: torch.dtype, tmp_path: Path) -> None:
    model = random_model(FAMILIES["llama"]).to(dtype)
    model.save_pretrained(tmp_path)
    checkpoint = HFCheckpoint(tmp_path)
    found = weights_of(checkpoint, ReferenceOps()).tensor("model.embed_tokens.weight", 96, 64)
    assert found.dtype is dtype
    assert torch.equal(found, model.state_dict()["model.embed_tokens.weight"])


def test_writing_to_a_tensor_does_not_reach_the_checkpoint(tmp_path: Path) -> None:
    random_model(FAMILIES["llama"]).to(torch.bfloat16).save_pretrained(tmp_path)
    checkpoint = HFCheckpoint(tmp_path)
    found = weights_of(checkpoint, ReferenceOps()).tensor("model.norm.weight", 64)
    found.zero_()
    assert checkpoint.tensor("model.norm.weight").all()


def test_a_tensor_outlives_its_file(tmp_path: Path) -> None:
    random_model(FAMILIES["llama"]).save_pretrained(tmp_path)
    expected = HFCheckpoint(tmp_path).tensor("model.norm.weight").copy()
    found = weights_of(HFCheckpoint(tmp_path), ReferenceOps()).tensor("model.norm.weight", 64)
    gc.collect()
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_fp8_projections_with_scales_of_their_own_join_exactly(layout: Layout, tmp_path: Path) -> None:
    expected = write_fp8(tmp_path, layout)
    packed = packed_qkv(tmp_path)
    assert isinstance(packed, Fp8Weight)
    assert (packed.values.dtype, packed.scales.shape) == (torch.float8_e4m3fn, (128,))
    assert torch.equal(packed.dequantized(), qkv_of(expected))


def test_joined_projections_take_the_largest_of_their_input_scales(tmp_path: Path) -> None:
    write_fp8(tmp_path, STATIC)
    for name, scale in zip(QKV, (0.5, 4.0, 2.0), strict=True):
        edit_tensor(tmp_path, f"model.layers.0.self_attn.{name}.input_scale", torch.tensor(scale))
    packed = packed_qkv(tmp_path)
    assert isinstance(packed, Fp8Weight)
    assert packed.input_scale == 4.0


def test_dynamic_activations_have_no_input_scale(tmp_path: Path) -> None:
    write_fp8(tmp_path, DYNAMIC)
    packed = packed_qkv(tmp_path)
    assert isinstance(packed, Fp8Weight)
    assert packed.input_scale is None


def test_fp8_joined_with_an_unquantized_projection_is_dequantized(tmp_path: Path) -> None:
    expected = write_fp8(tmp_path, DYNAMIC)
    name = "model.layers.0.self_attn.k_proj.weight"
    expected[name] = expected[name].bfloat16().float()
    edit_tensor(tmp_path, name, expected[name].bfloat16())
    packed = packed_qkv(tmp_path)
    assert isinstance(packed, Tensor)
    assert torch.equal(packed, qkv_of(expected))


@pytest.mark.parametrize("make_ops", [ReferenceOps, NativeOps])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_cpu_computes_with_the_dequantized_weights(layout: Layout, make_ops: type[Ops], tmp_path: Path) -> None:
    expected = write_fp8(tmp_path, layout)
    try:
        ops = make_ops()
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    checkpoint = HFCheckpoint(tmp_path)
    plain = ArrayCheckpoint(checkpoint.config, {name: values.numpy() for name, values in expected.items()})
    ours, theirs = (
        PagedDriver(load_model(source, ops), ops, block_size=4).prefill(list(range(20)))
        for source in (checkpoint, plain)
    )
    assert torch.equal(ours, theirs)
