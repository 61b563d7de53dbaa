"""What rounding activations to 8 bits costs the default model: integers in the kernels against the very same weights
in float32."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from tools.perplexity import open_model, prose
from torch import Tensor

from penstock.model.loading import load_model
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.native import NativeOps
from penstock.text.tokenizer import Tokenizer
from tests.model.paged import PagedDriver

pytestmark = pytest.mark.slow

WINDOWS, LENGTH = 6, 128
PERPLEXITY_COST = 0.01  # at most
LOGIT_ERROR = 0.1  # at most, of all logits' deviation from their mean


@cache
def text() -> Tensor:
    token_ids = prose(Tokenizer.load(open_model("smollm2").tokenizer_source))
    return torch.tensor(token_ids[: WINDOWS * LENGTH]).view(WINDOWS, LENGTH)


@cache
def logits(*bits: int) -> Tensor:
    """[windows, tokens, vocabulary], with weights of these bits kept as the file has them, all others as float32."""
    try:
        ops = NativeOps("float32", keeps=frozenset(bits))
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
    driver = PagedDriver(load_model(open_model("smollm2"), ops), ops, block_size=16)
    return torch.stack([driver.prefill(window.tolist()) for window in text()])


def perplexity(found: Tensor) -> float:
    return float(F.cross_entropy(found[:, :-1].flatten(0, 1), text()[:, 1:].flatten()).exp())


def test_perplexity_is_that_of_the_widened_weights() -> None:
    exact, kept = perplexity(logits()), perplexity(logits(4, 8))
    assert kept != exact, "nothing was kept"
    assert kept < exact * (1 + PERPLEXITY_COST)


def test_logits_are_near_those_of_the_widened_weights() -> None:
    exact, kept = logits(), logits(4, 8)
    spread = exact - exact.mean(2, keepdim=True)
    assert (kept - exact).norm() / spread.norm() < LOGIT_ERROR
