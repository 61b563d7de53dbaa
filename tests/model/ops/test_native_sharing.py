"""Sequences that have a prefix in the same blocks: the C kernels attend to it once for all of them, and every row is
what it is alone, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.model.loading import random_model
from penstock.model.ops.library import ARITHMETICS, LOW_BIT
from penstock.model.ops.native import NativeOps
from penstock.quant import Quant, to_quant
from tests.examples import examples
from tests.model.ops.test_native import SHAPES, Attention, Shape, native, new_sequence, unavailable
from tests.model.paged import PagedDriver, PagedSequence
from tests.runner.small import CONFIG

LONG = replace(CONFIG, hidden_size=64, intermediate_size=96, context_length=1024)
SPAN = 256  # positions: what is attended as a whole, and shared as a whole
TRUNK = 2 * SPAN + 40


@lru_cache
def int8(threads: int) -> NativeOps:
    return NativeOps("float32", threads=threads, kv_dtype=torch.int8)


def low_bit() -> bool:
    return all(native("float32").library.arithmetic_at(place) for place in LOW_BIT.values())


@dataclass(frozen=True)
class Branch:
    """A sequence that begins with another's tokens, in its blocks; its last `queries` tokens are asked for."""

    shared: int
    qkv: Tensor
    queries: int

    def grow(self, attention: Attention, trunk: PagedSequence) -> PagedSequence:
        blocks = self.shared // attention.shape.block_size
        begun = blocks * attention.shape.block_size
        sequence = PagedSequence([0] * (begun + len(self.qkv)), trunk.blocks[:blocks], begun)
        attention.step([(sequence, self.qkv[: -self.queries])])
        return sequence


def asked(attention: Attention, trunk: PagedSequence, branches: Sequence[Branch]) -> list[Tensor]:
    """In one step, of sequences that were computed one by one before."""
    return attention.step([(branch.grow(attention, trunk), branch.qkv[-branch.queries :]) for branch in branches])


@settings(max_examples=examples(10))
@given(
    arithmetic=st.sampled_from([*ARITHMETICS, "int8"]),
    shape=st.sampled_from(SHAPES),
    spans=st.lists(st.integers(0, 2), min_size=2, max_size=6),
    queries=st.integers(1, 3),
    own=st.integers(4, 120),
    threads=st.sampled_from((1, 2, 3)),
)
def test_a_row_is_the_same_whoever_shares_its_prefix(
    arithmetic: str, shape: Shape, spans: list[int], queries: int, own: int, threads: int
) -> None:
    """Some share more than others, some nothing, and some only what is no whole span."""
    assume(not unavailable("float32" if arithmetic == "int8" else arithmetic))
    assume(arithmetic != "int8" or shape.value_dim is None)
    ops = int8(threads) if arithmetic == "int8" else native(arithmetic, threads)
    branches = [
        Branch(n * SPAN + 32 * (i % 2), shape.random_qkv(own + i), 1 if i % 3 else queries) for i, n in enumerate(spans)
    ]
    attention, trunk = Attention(ops, shape, num_blocks=6000), new_sequence(TRUNK)
    attention.step([(trunk, shape.random_qkv(TRUNK))])
    for branch, found in zip(branches, asked(attention, trunk, branches), strict=True):
        assert torch.equal(found, asked(attention, trunk, [branch])[0])


@pytest.mark.parametrize("quant", ["none", "int4"])
def test_a_model_s_step_shares_what_its_decodes_have_in_common(quant: Quant) -> None:
    """With so many of them that products fetch the next layer's keys and values, which changes nothing either."""
    if reason := unavailable("bfloat16"):
        pytest.skip(reason)
    ops = NativeOps("bfloat16", threads=2, keeps=frozenset(LOW_BIT if low_bit() else ()))
    model = random_model(LONG, ops, quantize=partial(to_quant, quant))
    driver = PagedDriver(model, ops, block_size=16, num_blocks=200)
    ops.settle_kv(driver.kv).join()
    trunk = driver.sequence([7 * i % LONG.vocab_size for i in range(600)])
    driver.step([(trunk, 600)])

    def branch(i: int) -> PagedSequence:
        shared = 37 if i % 3 else 32 if i % 2 else 2  # blocks: two spans and more, two spans, none
        return driver.sequence([*trunk.token_ids[: shared * 16], i, i + 1, i + 2], shares=trunk, blocks=shared)

    together = [branch(i) for i in range(26)]
    driver.step([(sequence, 2) for sequence in together])
    found = driver.step([(sequence, 1) for sequence in together])
    for i in range(0, 26, 5):
        alone = branch(i)
        driver.step([(alone, 2)])
        assert torch.equal(driver.step([(alone, 1)])[0], found[i])
