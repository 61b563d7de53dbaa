"""Experts, and projections that are joined in the file, in the formats of public checkpoints: as the weights they stand
for, and in the integers that they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.hub.gguf import GGUFCheckpoint
from penstock.hub.hf import HFCheckpoint
from penstock.model.loading import load_model
from penstock.model.ops.reference import ReferenceOps
from penstock.quant import to_quant
from tests.hub import fp8_checkpoints, integer_checkpoints
from tests.hub.more_families import MORE, saved, write_gguf
from tests.model.paged import PagedDriver
from tests.model.tiny import ArrayCheckpoint

TOKENS = list(range(20))


def write(layout: str, family: str, directory: Path) -> dict[str, torch.Tensor]:
    if layout in integer_checkpoints.LAYOUTS:
        return integer_checkpoints.write_integers(directory, integer_checkpoints.LAYOUTS[layout], MORE[family])
    return fp8_checkpoints.write_fp8(directory, fp8_checkpoints.LAYOUTS[layout], MORE[family])


@pytest.mark.parametrize(
    ("layout", "family"), [("GPTQ", "qwen2_moe"), ("fp8, static", "qwen2_moe"), ("AWQ", "phi4"), ("W8A8", "phi4")]
)
def test_quantized_weights_are_those_they_stand_for(layout: str, family: str, tmp_path: Path) -> None:
    expected = write(layout, family, tmp_path)
    checkpoint, ops = HFCheckpoint(tmp_path), ReferenceOps()
    plain = ArrayCheckpoint(checkpoint.config, {name: values.numpy() for name, values in expected.items()})
    ours, theirs = (
        PagedDriver(load_model(source, ops), ops, block_size=4).prefill(TOKENS) for source in (checkpoint, plain)
    )
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_experts_are_quantized_while_they_are_loaded_and_the_router_is_not(tmp_path: Path) -> None:
    directory, tensors = saved("mixtral", tmp_path)
    ops = ReferenceOps()
    ours = load_model(HFCheckpoint(directory), ops, quantize=lambda weight: to_quant("int8", weight))
    rounded = {
        name: to_quant("int8", torch.from_numpy(values)).dequantized().numpy()  # type: ignore[union-attr]
        if "_proj." in name or ".experts." in name
        else values
        for name, values in tensors.items()
    }
    theirs = load_model(ArrayCheckpoint(ours.config, rounded), ops)
    logits = [PagedDriver(model, ops, block_size=4).prefill(TOKENS) for model in (ours, theirs)]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_a_gguf_says_what_its_directory_says(name: str, tmp_path: Path) -> None:
    directory, tensors = saved(name, tmp_path / "hf")
    ops = ReferenceOps()
    sources = HFCheckpoint(directory), GGUFCheckpoint(write_gguf(tmp_path / "model.gguf", MORE[name], tensors))
    logits = [PagedDriver(load_model(source, ops), ops, block_size=4).prefill(TOKENS) for source in sources]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
