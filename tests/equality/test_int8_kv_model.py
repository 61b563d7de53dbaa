"""The default model with its KV cache in int8: as good as in float32, and the same alone as in a batch."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from tools.perplexity import open_model, prose
from torch import Tensor

from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.model.layers import CausalLM
from penstock.model.loading import load_model
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.native import NativeOps
from penstock.text.tokenizer import Tokenizer
from tests.equality.inprocess import InProcess
from tests.model.paged import PagedDriver

pytestmark = pytest.mark.slow

WINDOWS, LENGTH = 3, 128
PERPLEXITY_COST = 0.01  # at most
LOGIT_ERROR = 0.1  # at most, of all logits' deviation from their mean
GREEDY = SamplingParams(temperature=0.0)


@cache
def loaded(kv_dtype: torch.dtype | None) -> tuple[CausalLM, NativeOps]:
    try:
        ops = NativeOps("float32", threads=1, kv_dtype=kv_dtype)
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
    return load_model(open_model("smollm2"), ops), ops


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(open_model("smollm2").tokenizer_source)


@cache
def text() -> Tensor:
    return torch.tensor(prose(tokenizer())[: WINDOWS * LENGTH]).view(WINDOWS, LENGTH)


@cache
def logits(kv_dtype: torch.dtype | None) -> Tensor:
    """[windows, tokens, vocabulary]"""
    driver = PagedDriver(*loaded(kv_dtype), block_size=16)
    return torch.stack([driver.prefill(window.tolist()) for window in text()])


def perplexity(found: Tensor) -> float:
    return float(F.cross_entropy(found[:, :-1].flatten(0, 1), text()[:, 1:].flatten()).exp())


def test_perplexity_is_that_of_a_cache_in_float32() -> None:
    exact, kept = perplexity(logits(None)), perplexity(logits(torch.int8))
    assert kept != exact, "the cache is no other"
    assert kept < exact * (1 + PERPLEXITY_COST)


def test_logits_are_near_those_of_a_cache_in_float32() -> None:
    exact, kept = logits(None), logits(torch.int8)
    spread = exact - exact.mean(2, keepdim=True)
    assert (kept - exact).norm() / spread.norm() < LOGIT_ERROR


def test_greedy_text_is_sane_and_the_same_alone_as_in_a_batch() -> None:
    texts = ["The capital of France is", "1, 1, 2, 3, 5, 8,", "Once upon a time, in a village between two rivers,"]
    requests = [
        Request(text, tokenizer().encode(text, add_special_tokens=False), 12, sampling=GREEDY) for text in texts
    ]
    together = InProcess(*loaded(torch.int8), block_size=16, chunk_tokens=7)
    together.run(*requests, apart=1)
    assert tokenizer().decode(together.outputs[texts[0]]).startswith(" Paris")
    for request in requests:
        alone = InProcess(*loaded(torch.int8), block_size=16)
        alone.run(request)
        assert together.outputs[request.id] == alone.outputs[request.id]
        assert torch.equal(torch.stack(together.logits[request.id]), torch.stack(alone.logits[request.id]))
