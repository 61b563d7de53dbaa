"""Experts in MXFP4 are read as transformers reads them; a rank reads its part; what is none is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.core.errors import ModelCorrupt, ModelUnsupported
from penstock.hub.hf import HFCheckpoint
from penstock.hub.stored import Mxfp4Tensor, Part
from penstock.model.quantized.mxfp4 import Mxfp4Weight
from penstock.model.weights import read_stored
from penstock.quant import mxfp4
from tests.hub.mxfp4_checkpoints import EXPERTS, dequantized, write_mxfp4

AT = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mxfp4")
    write_mxfp4(path)
    return path


def test_experts_are_those_that_transformers_reads(directory: Path) -> None:
    tensors, checkpoint = load_file(directory / "model.safetensors"), HFCheckpoint(directory)
    assert checkpoint.config.quantization == "mxfp4"
    gate_up, down = (
        dequantized(tensors[f"{AT}.{name}_blocks"], tensors[f"{AT}.{name}_scales"]).transpose(1, 2)
        for name in ("gate_up_proj", "down_proj")
    )
    expected = {"gate_proj": gate_up[:, ::2], "up_proj": gate_up[:, 1::2], "down_proj": down}
    for name, stack in expected.items():
        for expert in range(EXPERTS):
            found = checkpoint.tensor(f"{AT}.{expert}.{name}.weight")
            assert np.array_equal(found, stack[expert].numpy())


def test_they_stay_in_4_bits(directory: Path) -> None:
    name = f"{AT}.2.gate_proj.weight"
    found = read_stored(HFCheckpoint(directory), name, torch.device("cpu"))
    assert isinstance(found, Mxfp4Weight)
    assert found.num_bytes == found.shape.numel() * 4.25 / 8
    assert np.array_equal(found.dequantized().numpy(), HFCheckpoint(directory).tensor(name))


def test_a_part_is_cut_from_the_blocks(directory: Path) -> None:
    checkpoint, name = HFCheckpoint(directory), f"{AT}.3.down_proj.weight"
    part = Part((64, 128), slice(16, 48), slice(32, 96))
    found = checkpoint.stored_part(name, part)
    assert isinstance(found, Mxfp4Tensor)
    assert found.values.nbytes == 32 * 64 / 2
    assert np.array_equal(found.widened(), checkpoint.tensor(name)[16:48, 32:96])


def test_a_group_is_not_cut(directory: Path) -> None:
    part = Part((64, 128), slice(0, 64), slice(32, 80))
    with pytest.raises(ModelUnsupported, match="cannot be split at input 80: its groups of 32"):
        HFCheckpoint(directory).stored_part(f"{AT}.3.down_proj.weight", part)


def test_what_is_no_mxfp4_is_refused(directory: Path, tmp_path: Path) -> None:
    tensors, name = load_file(directory / "model.safetensors"), f"{AT}.down_proj"

    def refused(changed: dict[str, torch.Tensor | None], message: str) -> None:
        found = {**tensors, **changed}
        save_file({key: each for key, each in found.items() if each is not None}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((directory / "config.json").read_text())
        with pytest.raises((ModelCorrupt, ModelUnsupported), match=message):
            HFCheckpoint(tmp_path)

    refused({f"{name}_scales": None}, "down_proj_scales' is missing")
    refused({f"{name}_scales": tensors[f"{name}_scales"][:, 1:].contiguous()}, "no experts in MXFP4")
    refused({f"{name}_blocks": tensors[f"{name}_blocks"].to(torch.int32)}, "no experts in MXFP4")
    refused({key: None for key in tensors if key.endswith("_blocks")}, "no weight in its layout")


def test_rounding_takes_the_nearest_number() -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 96) * torch.randn(8, 1).exp()
    found = mxfp4.quantized(weight)
    groups, scales = weight.view(8, 3, 32), torch.ldexp(torch.ones(8, 3), found.scales.int() - 127)[:, :, None]
    steps = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = torch.cat((steps, -steps)) * scales  # [8, 3, 16]
    nearest = (groups[..., None] - numbers[:, :, None]).abs().amin(3)
    torch.testing.assert_close((found.dequantized().view(8, 3, 32) - groups).abs(), nearest)
    assert (groups.abs().amax(2) / scales[..., 0]).max() < 8
    assert (groups.abs().amax(2) / scales[..., 0]).min() >= 4
    assert not mxfp4.quantized(torch.zeros(2, 32)).dequantized().any()
