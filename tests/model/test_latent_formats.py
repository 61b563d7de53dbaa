"""DeepSeek's weights in the formats of public checkpoints: latents are made of the weights that these stand for, whole
and on two ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import DeepseekV3Config

from penstock.hub.checkpoint import Checkpoint
from penstock.hub.hf import HFCheckpoint
from penstock.model.loading import load_model
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.native import NativeOps
from penstock.model.ops.reference import ReferenceOps
from penstock.quant import to_quant
from tests.hub import fp8_checkpoints, integer_checkpoints
from tests.hub.families import random_model
from tests.model.paged import PagedDriver
from tests.model.ranks import ThreadRanks, on_every_rank
from tests.model.tiny import ArrayCheckpoint

TOKENS = list(range(20))
CONFIG = DeepseekV3Config(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=24,
    qk_rope_head_dim=8,
    v_head_dim=32,
    max_position_embeddings=64,
)


def write(layout: str, directory: Path) -> ArrayCheckpoint:
    """The weights that a reader must find, as a checkpoint."""
    if layout in integer_checkpoints.LAYOUTS:
        expected = integer_checkpoints.write_integers(directory, integer_checkpoints.LAYOUTS[layout], CONFIG)
    else:
        expected = fp8_checkpoints.write_fp8(directory, fp8_checkpoints.LAYOUTS[layout], CONFIG)
    config = HFCheckpoint(directory).config
    return ArrayCheckpoint(config, {name: values.numpy() for name, values in expected.items()})


def says(checkpoint: Checkpoint, ranks: ThreadRanks | None = None) -> torch.Tensor:
    ops = ReferenceOps()
    return PagedDriver(load_model(checkpoint, ops, ranks=ranks), ops, block_size=4).prefill(TOKENS, chunk=15)


@pytest.mark.parametrize("layout", ["GPTQ", "AWQ", "W8A8", "fp8, dynamic"])
def test_weights_are_those_they_stand_for_whole_and_on_two_ranks(layout: str, tmp_path: Path) -> None:
    plain = says(write(layout, tmp_path))
    stored = HFCheckpoint(tmp_path)
    for logits in (says(stored), *on_every_rank(2, lambda ranks: says(stored, ranks))):
        torch.testing.assert_close(logits, plain, atol=1e-4, rtol=1e-4)


def test_weights_of_4_bits_run_in_c(tmp_path: Path) -> None:
    """What is rounded is small beside what the logits are."""
    try:
        ops = NativeOps("float32", threads=1, keeps=frozenset({4}))
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
    random_model(CONFIG).save_pretrained(tmp_path)
    checkpoint, quantize = HFCheckpoint(tmp_path), partial(to_quant, "int4")
    ours = PagedDriver(load_model(checkpoint, ops, quantize=quantize), ops, block_size=16).prefill(TOKENS)
    reference = ReferenceOps()
    theirs = PagedDriver(load_model(checkpoint, reference, quantize=quantize), reference, block_size=16).prefill(TOKENS)
    torch.testing.assert_close(ours, theirs, atol=0.02 * float(theirs.abs().max()), rtol=0.02)
