"""Launches of every kernel through the host code that chooses them: each format of linear and expert, with few rows
and many, every kind of attention and cache, adapters, and a step of each family's model. Nothing is computed here:
`compiler` keeps what would have been launched."""

from __future__ import annotations

from dataclasses import replace

import torch

from penstock.core.model_config import ClampedSwiGLU
from penstock.model.loading import load_model
from penstock.model.ops import ExpertWeights, KVShape, Norm, Stream
from penstock.model.ops.experts import ExpertMap
from penstock.model.ops.triton import TritonKV, TritonOps
from penstock.model.ops.triton.attention.kv_copy import as_words, copy_between, gather_blocks, scatter_blocks
from penstock.model.ops.triton.attention.merge import merge_parts
from penstock.model.ops.triton.common.argmax import argmax
from penstock.model.ops.triton.common.device import capability
from penstock.model.ops.triton.lora.slots import TritonSlots
from penstock.model.random_weights import RandomCheckpoint
from penstock.model.sequence import TokenSplit, packed
from penstock.model.weights import Site
from tests.equality.formats import FORMATS
from tests.model.family_configs import CONFIGS
from tests.model.ops.triton.pair import Both, Heads
from tests.model.ops.triton.test_triton_drafts import spread
from tests.model.ops.triton.test_triton_shared_prefix import MIXED
from tests.model.paged import PagedDriver, PagedSequence, make_batch

HALF = torch.bfloat16
HIDDEN, WIDE = 512, 1024
FP8 = torch.float8_e4m3fn


def linears(name: str, dtype: torch.dtype = HALF) -> None:
    """A layer's four products, with few rows and many; those before, between and behind them."""
    ops, keep = TritonOps("cpu", dtype), FORMATS[name]
    output = ops.linear(keep(torch.randn(HIDDEN, HIDDEN)), torch.randn(HIDDEN))
    gate_up, down = ops.linear(keep(torch.randn(2 * WIDE, HIDDEN))), ops.linear(keep(torch.randn(HIDDEN, WIDE)))
    norm = Norm(torch.ones(HIDDEN, dtype=dtype), 1e-5)
    for rows in (1, 9, 40):
        x = torch.zeros(rows, HIDDEN, dtype=dtype)
        stream = Stream(x.clone())
        ops.norm_linear(stream, norm, output)
        ops.add_linear(stream, x, output)
        ops.feed_forward(stream, norm, gate_up, down)
        ops.norm_linear(stream, norm, gate_up)


def tables(name: str) -> None:
    ops, table = TritonOps("cpu", HALF), FORMATS[name](torch.randn(96, HIDDEN))
    embedding, _ = ops.tied(table)
    embedding(torch.tensor([3, 95]))
    if name != "plain":
        ops.head(table)(torch.zeros(600, HIDDEN, dtype=HALF))  # so many that it is widened


def experts(name: str, dtype: torch.dtype = HALF, *, is_gpt_oss: bool = False) -> None:
    """`is_gpt_oss`: with biases and a clamped gate."""
    keep, biases = FORMATS[name], (torch.randn(512), torch.randn(256)) if is_gpt_oss else ()
    pairs = [ExpertWeights(keep(torch.randn(512, 256)), keep(torch.randn(256, 256)), *biases) for _ in range(8)]
    ops = TritonOps("cpu", dtype)
    made = ops.experts(8, iter(pairs), activation=ClampedSwiGLU() if is_gpt_oss else "silu")
    for tokens in (1, 12, 40, 400):
        logits = torch.zeros(tokens, 8, dtype=dtype)
        ids, shares = ops.route(logits, 2, normalized=True)
        counts = torch.zeros(8, 2, dtype=torch.int64)
        singles = make_batch([(PagedSequence([1], [1]), 1)] * tokens)
        for places in (None, torch.zeros(8, 3, dtype=torch.int32)):
            ops.route(logits, 2, normalized=True, experts=ExpertMap(counts, places), batch=singles)
        made(torch.zeros(tokens, 256, dtype=dtype), ids, shares)
    ops.add_shared(*torch.zeros(2, 3, 256, dtype=dtype), torch.zeros(3, 1, dtype=dtype))


def attention(heads: Heads, dtype: torch.dtype, block_size: int, kv_dtype: torch.dtype | None = None) -> None:
    """Prompts, decodes, drafts, and decodes that share a prefix."""
    both = Both(heads, dtype, block_size, 100, kv_dtype)
    mixed = make_batch(both.work([(70, 1), (0, 45), (5, 1)]))
    drafts = spread(both.work([(30, 5), (7, 1)]))
    batches = [mixed, drafts]
    if heads.window is None and heads.value_dim is None:
        batches.append(replace(make_batch(MIXED.work(both)), shared=MIXED.shared(block_size, tile=4)))
    spec, angles = heads.spec(dtype), both.rope()
    for batch in batches:
        both.ours.begin(batch)
        both.ours.attention(both.qkv(batch.num_tokens), spec, angles, both.our_kv, batch)


def sequence_parts(
    heads: Heads, dtype: torch.dtype, block_size: int, kv_dtype: torch.dtype | None = None, *, place: int = 1
) -> None:
    """Attention over the tokens that one of two ranks keeps, and the merge of what both found."""
    both = Both(heads, dtype, block_size, 100, kv_dtype, tokens=TokenSplit(place, 2))
    batches = [make_batch(both.work([(70, 1), (0, 45), (5, 1)])), spread(both.work([(30, 5), (7, 1)]))]
    spec, angles = heads.spec(dtype), both.rope()
    for batch in batches:
        both.ours.begin(batch)
        lse = torch.empty(batch.num_tokens, heads.num_heads)
        out = both.ours.attended(both.qkv(batch.num_tokens), spec, angles, both.our_kv, batch, lse)
        merge_parts(packed(out, lse, 2), heads.num_heads // 2)


def family(name: str) -> None:
    ops = TritonOps("cpu", HALF)
    driver = PagedDriver(load_model(RandomCheckpoint(CONFIGS[name]), ops), ops, block_size=16)
    long, short = driver.sequence(range(5, 60)), driver.sequence(range(100, 122))
    for work in ([(long, 40), (short, 20)], [(long, 1), (short, 1)], [(short, 1)]):
        driver.step(work)


def adapters(dtype: torch.dtype) -> None:
    outputs = {"q": 96, "k": 32, "v": 32}
    slots = TritonSlots(TritonOps("cpu", dtype), [Site(lambda x: x, outputs, 64)], num_slots=2, max_rank=16)
    decodes, prompt = [(PagedSequence([0], [1]), 1)] * 4, [(PagedSequence([0] * 21, [1, 2]), 21)]
    for work in (decodes, prompt):
        batch = make_batch(work)
        slots.begin(replace(batch, slots=torch.zeros_like(batch.token_ids)))
        x = torch.zeros(batch.num_tokens, 64, dtype=dtype)
        slots.add(0, x, x.new_zeros(batch.num_tokens, sum(outputs.values())))


def choices_and_blocks() -> None:
    for dtype in (torch.float32, HALF):
        argmax(torch.zeros(3, 20_000, dtype=dtype))
    first = TritonOps("cpu", HALF).allocate_kv(KVShape(3, 9, 16, 2, 128))[0]
    assert isinstance(first, TritonKV)
    words, ids = as_words(first.pool), torch.tensor([5, 0], dtype=torch.int32)
    packed = torch.zeros(2, words.shape[0], words.shape[2], dtype=torch.int32)
    gather_blocks(words, ids, packed)
    scatter_blocks(packed, ids, words)
    copy_between(words, ids, words, ids)


def launch_all() -> None:
    for name in FORMATS:
        linears(name)
        experts(name)
        if "order" not in name:
            tables(name)
    for name in ("plain", "Q4_0", "Q8_0"):
        linears(name, torch.float16)
    for name in ("plain", "int4", "w8a8", "MXFP4"):
        experts(name, is_gpt_oss=True)
    experts("MXFP4", torch.float16)
    linears("plain", torch.float32)
    experts("plain", torch.float32)
    for dtype in (torch.float32, HALF):
        adapters(dtype)
    attention(Heads(8, 2, 128), HALF, 64)
    attention(Heads(9, 3, 64, norm=True), HALF, 16)
    if capability() >= (8, 9):  # others are refused an FP8 cache: `runner.precision`
        attention(Heads(8, 2, 128), HALF, 64, FP8)
        attention(Heads(4, 4, 96, cap=1.5), HALF, 16, FP8)
    attention(Heads(4, 2, 32, window=40), HALF, 16)
    attention(Heads(4, 2, 32, window=64, in_chunks=True), HALF, 16)
    attention(Heads(64, 8, 64, has_sinks=True), HALF, 64)
    attention(Heads(8, 2, 64), torch.float32, 64)
    attention(Heads(128, 1, 576, value_dim=512), HALF, 64)
    attention(Heads(16, 1, 576, value_dim=512), HALF, 16)
    attention(Heads(16, 1, 576, value_dim=512), torch.float32, 64)
    sequence_parts(Heads(8, 2, 128), HALF, 64, FP8 if capability() >= (8, 9) else None)
    sequence_parts(Heads(4, 2, 32, window=40, norm=True), HALF, 16)
    sequence_parts(Heads(4, 2, 32, window=64, in_chunks=True), HALF, 16)
    sequence_parts(Heads(8, 2, 64), torch.float32, 16)
    sequence_parts(Heads(8, 2, 64, has_sinks=True), HALF, 16, place=0)
    for name in CONFIGS:
        family(name)
    choices_and_blocks()
