"""Ranks that share out tokens, by the kernels of the CPU through real shared memory: one is a thread here."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.core.model_config import ModelConfig
from penstock.model.loading import load_model
from penstock.model.ops import library as c
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.native import NativeOps
from penstock.model.ops.shared_memory import SharedMemoryRanks
from penstock.model.random_weights import RandomCheckpoint
from penstock.model.ranks import Ranks
from penstock.model.sequence import TokenSplit, merged, packed
from penstock.model.shard import Shard
from tests.model.family_configs import CONFIGS, SHAPE
from tests.model.paged import PagedDriver
from tests.model.ranks import on_every_rank

WINDOWED = replace(SHAPE, architecture="qwen3", windows=(None, 30), num_kv_heads=1)
LONG = replace(SHAPE, context_length=2048)
PROMPT = [(7 * place + place // 5) % 390 for place in range(90)]
SLOT_BYTES = 8192  # less than a chunk of queries: they go in pieces, of a row at least


def native(kv_dtype: torch.dtype | None = None, arithmetic: str = "float32") -> NativeOps:
    try:
        return NativeOps(arithmetic, threads=1, kv_dtype=kv_dtype)
    except KernelsUnavailable as error:
        pytest.skip(str(error))


def in_shared_memory(size: int, sp: int, run: Callable[[SharedMemoryRanks], Tensor]) -> list[Tensor]:
    native()
    memory = SharedMemoryRanks.create(size, SLOT_BYTES)

    def one(rank: int) -> Tensor:
        shard = Shard(rank, size, sp)
        return run(SharedMemoryRanks(shard, os.dup(memory), timeout_s=60.0, slot_bytes=SLOT_BYTES))

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(one, range(size)))
    os.close(memory)
    return found


def logits(
    ranks: Ranks | None,
    ops: NativeOps,
    *,
    config: ModelConfig = WINDOWED,
    block_size: int = 16,
    chunk: int = 33,
    prompt: list[int] = PROMPT,
) -> Tensor:
    tokens = ranks.shard.tokens if ranks is not None else TokenSplit()
    model = load_model(RandomCheckpoint(config), ops, ranks=ranks)
    return PagedDriver(model, ops, block_size=block_size, tokens=tokens, num_blocks=150).prefill(prompt, chunk=chunk)


@pytest.mark.parametrize(("size", "sp"), [(2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("block_size", [16, 5])
def test_ranks_in_shared_memory_say_what_one_says(size: int, sp: int, block_size: int) -> None:
    whole = logits(None, native())
    found = in_shared_memory(size, sp, lambda ranks: logits(ranks, native(), block_size=block_size))
    for each in found:
        torch.testing.assert_close(each, whole, rtol=2e-4, atol=2e-4)
        assert torch.equal(each, found[0]), "all ranks have the same bits"


def test_a_row_is_the_same_however_its_prompt_was_chunked() -> None:
    at_once = in_shared_memory(2, 2, lambda ranks: logits(ranks, native(), chunk=90))
    for chunk in (1, 17):
        for each in in_shared_memory(2, 2, lambda ranks, chunk=chunk: logits(ranks, native(), chunk=chunk)):
            assert torch.equal(each, at_once[0])


@pytest.mark.parametrize("family", ["mixtral", "gemma2"])
def test_layers_that_are_run_one_by_one_reach_the_same_ranks(family: str) -> None:
    config = CONFIGS[family]
    whole = logits(None, native(), config=config)
    for each in in_shared_memory(2, 2, lambda ranks: logits(ranks, native(), config=config)):
        torch.testing.assert_close(each, whole, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("reaches_ranks", [True, False], ids=["C reaches the ranks", "it does not"])
def test_contexts_of_several_spans(reaches_ranks: bool) -> None:
    """A span is 256 tokens of those that a rank keeps."""
    prompt = [(11 * place + place // 7) % 390 for place in range(1100)]

    def run(ranks: Ranks | None) -> Tensor:
        return logits(ranks, native(), config=LONG, chunk=500, prompt=prompt)[-40:]

    whole = run(None)
    found = in_shared_memory(2, 2, run) if reaches_ranks else on_every_rank(2, run, 2)
    for each in found:
        torch.testing.assert_close(each, whole, rtol=5e-4, atol=5e-4)


def test_a_cache_of_8_bits_is_shared_out_too() -> None:
    whole = logits(None, native(torch.int8))
    for each in in_shared_memory(2, 2, lambda ranks: logits(ranks, native(torch.int8))):
        torch.testing.assert_close(each, whole, rtol=2e-2, atol=2e-2)


def test_decodes_with_a_prefix_in_common_attend_to_it_once_on_every_rank() -> None:
    """Whole spans of what each rank keeps, found by the blocks of the table."""
    prefix = [(3 * place) % 390 for place in range(1056)]

    def run(ranks: Ranks | None) -> Tensor:
        ops, tokens = native(), ranks.shard.tokens if ranks is not None else TokenSplit()
        model = load_model(RandomCheckpoint(LONG), ops, ranks=ranks)
        driver = PagedDriver(model, ops, block_size=16, tokens=tokens, num_blocks=100)
        first = driver.sequence([*prefix, 1])
        driver.step([(first, len(prefix))])
        blocks = len(prefix) // driver.block_size
        others = [driver.sequence([*prefix, token], shares=first, blocks=blocks) for token in (2, 3, 4)]
        return driver.step([(each, 1) for each in (first, *others)])

    whole = run(None)
    for each in in_shared_memory(2, 2, run):
        torch.testing.assert_close(each, whole, rtol=5e-4, atol=5e-4)


def test_merging_in_c_is_merging_in_torch() -> None:
    """A rank that has seen nothing takes no part, whatever it brings."""
    ops, size, tokens, heads, dim = native(), 3, 4, 2, 8
    parts = packed(torch.randn(tokens, size * heads * dim), 5 * torch.randn(tokens, size * heads), size).contiguous()
    parts[1, 2, -heads:] = -torch.inf
    out = torch.empty(tokens, heads * dim)
    layer = c.Layer(heads=heads, dim=dim, ranks=size)
    ops.library.attention_merge(ops.pool, layer, parts.data_ptr(), out.data_ptr(), tokens)
    torch.testing.assert_close(out, merged(parts, heads))
