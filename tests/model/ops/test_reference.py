"""What Hugging Face's logits do not show: number formats, other devices, the cache, and any order of steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from penstock.core.model_config import ModelConfig
from penstock.model.loading import random_model
from penstock.model.ops import KVShape
from penstock.model.ops.reference import ReferenceOps
from tests.devices import NEEDS_GPU
from tests.examples import examples
from tests.model.paged import PagedDriver, PagedSequence

TINY = ModelConfig("qwen3", 256, 64, 96, 2, 4, 2, 16, 128, windows=(5, None))


def prefill(ops: ReferenceOps, chunk: int | None = None) -> torch.Tensor:
    driver = PagedDriver(random_model(TINY, ops), ops, block_size=4)
    return driver.prefill(list(range(30)), chunk).cpu()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 0.02), (torch.bfloat16, 0.15)], ids=str
)
def test_every_device_and_dtype_is_close_to_float32(device: str, dtype: torch.dtype, tolerance: float) -> None:
    ops = ReferenceOps(device, dtype)
    for chunk in (None, 7):
        torch.testing.assert_close(prefill(ops, chunk), prefill(ReferenceOps()), atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norm_is_that_of_transformers_to_the_bit(dtype: torch.dtype) -> None:
    x, weight = torch.randn(2, 5, 64).to(dtype)
    theirs = LlamaRMSNorm(64, eps=1e-5)
    theirs.weight.data = weight[0]
    assert torch.equal(ReferenceOps(dtype=dtype).rms_norm(x, weight[0], 1e-5), theirs(x))


def test_tied_table_is_stored_once() -> None:
    embedding, head = ReferenceOps(dtype=torch.bfloat16).tied(torch.randn(8, 4))
    assert embedding.keywords["weight"] is head.keywords["weight"]  # type: ignore[attr-defined]


def test_copied_blocks_appear_in_every_layer_and_nowhere_else() -> None:
    ops = ReferenceOps()
    kv = ops.allocate_kv(KVShape(num_layers=2, num_blocks=5, block_size=4, num_kv_heads=2, head_dim=8))
    for layer in kv:
        layer.keys.normal_()
        layer.values.normal_()
    before = [(layer.keys.clone(), layer.values.clone()) for layer in kv]
    ops.copy_blocks(kv, [(0, 3), (4, 1)])
    ops.copy_blocks(kv, [])
    for layer, (keys, values) in zip(kv, before, strict=True):
        assert torch.equal(layer.keys, keys[[0, 4, 2, 0, 4]])
        assert torch.equal(layer.values, values[[0, 4, 2, 0, 4]])


def test_step_writes_no_block_but_its_own() -> None:
    ops = ReferenceOps()
    driver = PagedDriver(random_model(TINY, ops), ops, block_size=4, num_blocks=16)
    sequence = driver.sequence(list(range(10)))
    driver.step([(sequence, 10)])
    written = {block for block, keys in enumerate(driver.kv[0].keys) if keys.any()}
    assert written == set(sequence.blocks)
    assert not driver.kv[0].keys[sequence.blocks[2], 2:].any()  # slots past the tenth token


@settings(max_examples=examples(12))
@given(
    counts=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4),
    block_size=st.integers(1, 8),
    windows=st.tuples(*[st.none() | st.integers(1, 12)] * 2),
    data=st.data(),
)
def test_logits_do_not_depend_on_how_tokens_are_batched(
    counts: list[list[int]], block_size: int, windows: tuple[int | None, ...], data: st.DataObject
) -> None:
    ops = ReferenceOps()
    model = random_model(replace(TINY, windows=windows), ops)
    driver = PagedDriver(model, ops, block_size=block_size, num_blocks=300)
    sequences = [driver.sequence([(7 * s + 3 * t) % 256 for t in range(sum(c))]) for s, c in enumerate(counts)]
    last: dict[int, torch.Tensor] = {}
    while any(counts):
        ready = [s for s, left in enumerate(counts) if left]
        chosen = data.draw(st.lists(st.sampled_from(ready), min_size=1, unique=True))
        work: list[tuple[PagedSequence, int]] = [(sequences[s], counts[s].pop()) for s in chosen]
        last |= dict(zip(chosen, driver.step(work), strict=True))
    for s, sequence in enumerate(sequences):
        whole = driver.prefill(sequence.token_ids)
        torch.testing.assert_close(last[s], whole[-1], atol=1e-4, rtol=1e-4)
