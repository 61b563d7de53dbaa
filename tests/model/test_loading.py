from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.core.errors import ModelCorrupt, ModelMissing, ModelUnsupported
from penstock.core.model_config import Experts, LatentAttention, LinearAttention, ModelConfig
from penstock.core.tokenizer_source import TokenizerMetadata
from penstock.hub.checkpoint import Checkpoint
from penstock.hub.families import FAMILY_FILES
from penstock.hub.stored import FloatArray
from penstock.model.families import FAMILIES
from penstock.model.loading import load_model, random_model
from penstock.model.ops.reference import ReferenceOps
from penstock.model.random_weights import MAX_DRAWN_BY_CPU, RandomCheckpoint
from tests.model.paged import PagedDriver
from tests.model.tiny import ArrayCheckpoint

LATENT = LatentAttention(rank=24, query_rank=20, plain_dim=12, rotary_dim=8, value_dim=10)
TINY = ModelConfig("llama", 256, 64, 96, 3, 4, 2, 16, 128)


def altered(alter: Callable[[str, FloatArray], FloatArray | None]) -> ArrayCheckpoint:
    """A random checkpoint whose tensors passed through `alter`; None drops the tensor."""
    source = RandomCheckpoint(TINY)
    arrays = {name: alter(name, source.tensor(name)) for name in source.tensor_names()}
    return ArrayCheckpoint(TINY, {name: array for name, array in arrays.items() if array is not None})


def first_logits(checkpoint: Checkpoint) -> torch.Tensor:
    ops = ReferenceOps()
    return PagedDriver(load_model(checkpoint, ops), ops, block_size=4).prefill([1, 2, 3])


def test_unknown_architecture_is_refused_with_those_known() -> None:
    with pytest.raises(ModelUnsupported, match=r"'mamba' is not supported.*llama, mistral, qwen2, qwen3"):
        load_model(RandomCheckpoint(replace(TINY, architecture="mamba")), ReferenceOps())


def test_first_missing_tensor_is_named() -> None:
    checkpoint = altered(lambda name, array: None if name.endswith("1.mlp.up_proj.weight") else array)
    with pytest.raises(ModelCorrupt, match=r"'model.layers.1.mlp.up_proj.weight' is missing"):
        load_model(checkpoint, ReferenceOps())


def test_tensor_of_the_wrong_shape_is_named_with_both_shapes() -> None:
    checkpoint = altered(lambda name, array: array[:-1] if "2.self_attn.k_proj.w" in name else array)
    with pytest.raises(ModelCorrupt, match=r"'model.layers.2.self_attn.k_proj.weight' is \[31, 64\], not \[32, 64\]"):
        load_model(checkpoint, ReferenceOps())


@pytest.mark.filterwarnings("error")
def test_read_only_tensors_load_like_any_other() -> None:
    def read_only(name: str, array: FloatArray) -> FloatArray:
        array.flags.writeable = False
        return array

    torch.testing.assert_close(first_logits(altered(read_only)), first_logits(RandomCheckpoint(TINY)), atol=0, rtol=0)


def test_progress_counts_layers() -> None:
    seen: list[tuple[int, int]] = []
    load_model(RandomCheckpoint(TINY), ReferenceOps(), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_random_model_of_every_family_runs(architecture: str) -> None:
    ops = ReferenceOps()
    experts = Experts(4, 2, 32, shared_intermediate_size=16) if FAMILY_FILES[architecture].experts else None
    config = replace(TINY, architecture=architecture, windows=(4, None, 4), local_rope_theta=100.0, experts=experts)
    if FAMILY_FILES[architecture].has_latents:
        config = replace(config, num_kv_heads=1, head_dim=LATENT.cached_dim, latent=LATENT)
    if FAMILY_FILES[architecture].has_linear_attention:
        config = replace(config, output_gate=True, linear=LinearAttention((0, 2), 2, 4, 8, 16, 4))
    model = random_model(config, ops)
    logits = PagedDriver(model, ops, block_size=4).prefill(list(range(20)))
    assert logits.shape == (20, 256)
    assert logits.isfinite().all()


def test_random_weights_follow_the_seed_and_the_name() -> None:
    name, other = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    weight = RandomCheckpoint(TINY, seed=1).tensor(name)
    np.testing.assert_array_equal(weight, RandomCheckpoint(TINY, seed=1).tensor(name))
    assert not np.array_equal(weight, RandomCheckpoint(TINY, seed=2).tensor(name))
    assert not np.array_equal(weight, RandomCheckpoint(TINY, seed=1).tensor(other))


def test_large_random_tensors_are_drawn_in_bfloat16_and_repeat() -> None:
    rows = MAX_DRAWN_BY_CPU // TINY.hidden_size
    name, cpu = "model.embed_tokens.weight", torch.device("cpu")
    drawn = RandomCheckpoint(replace(TINY, vocab_size=rows)).draw(name, cpu)
    assert drawn.dtype is torch.bfloat16
    assert torch.equal(drawn, RandomCheckpoint(replace(TINY, vocab_size=rows)).draw(name, cpu))
    assert RandomCheckpoint(replace(TINY, vocab_size=rows - 1)).draw(name, cpu).dtype is torch.float32


def test_the_many_small_experts_of_a_large_model_are_too() -> None:
    config = replace(TINY, architecture="mixtral", experts=Experts(800, 2, 4096))
    checkpoint, layer, cpu = RandomCheckpoint(config), "model.layers.0.", torch.device("cpu")
    assert checkpoint.draw(f"{layer}block_sparse_moe.experts.0.w1.weight", cpu).dtype is torch.bfloat16
    assert checkpoint.draw(f"{layer}input_layernorm.weight", cpu).dtype is torch.float32


def test_random_weights_keep_the_size_of_what_passes_through_them() -> None:
    checkpoint = RandomCheckpoint(TINY)
    assert np.std(checkpoint.tensor("lm_head.weight")) == pytest.approx(TINY.hidden_size**-0.5, rel=0.05)
    assert np.mean(checkpoint.tensor("model.norm.weight")) == pytest.approx(1.0, abs=0.1)
    assert np.mean(checkpoint.tensor("model.layers.0.self_attn.q_proj.bias")) == pytest.approx(0.0, abs=0.1)


def test_a_random_model_has_the_tokenizer_it_was_given() -> None:
    tokenizer = TokenizerMetadata({}, chat_template=None)
    assert RandomCheckpoint(TINY, tokenizer_source=tokenizer).tokenizer_source is tokenizer
    with pytest.raises(ModelMissing, match="no tokenizer"):
        _ = RandomCheckpoint(TINY).tokenizer_source
