"""What rounding activations to 8 bits costs the default model: integers in the kernels against the very same weights
in float32."""

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

WINDOWS, LENGTH = 6, 128
PERPLEXITY_COST = 0.01  # at most
LOGIT_ERROR = 0.1  # at most, of all logits' deviation from their mean


@cache
def text() -> Tensor:
    token_ids = prose(Tokenizer.load(open_model("smollm2").tokenizer_source))
    return torch.tensor(token_ids[: WINDOWS * LENGTH]).view(WINDOWS, LENGTH)


@cache
def model(*bits: int) -> tuple[CausalLM, NativeOps]:
    """With weights of these bits kept as the file has them, all others as float32."""
    try:
        ops = NativeOps("float32", threads=1, keeps=frozenset(bits))
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
    return load_model(open_model("smollm2"), ops), ops


@cache
def logits(*bits: int) -> Tensor:
    """[windows, tokens, vocabulary]"""
    driver = PagedDriver(*model(*bits), block_size=16)
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


def test_an_answer_is_the_same_to_the_bit_however_it_was_batched_chunked_cached_or_resumed() -> None:
    params = SamplingParams(temperature=0.0)
    prompts = [*(window[: 20 + 10 * i].tolist() for i, window in enumerate(text()[:3])), text()[0, :18].tolist()]
    requests = [Request(str(i), prompt, 40, sampling=params) for i, prompt in enumerate(prompts)]
    busy = InProcess(*model(4, 8), block_size=16, num_blocks=10, chunk_tokens=37, max_num_seqs=4)
    busy.run(*requests, apart=1)
    assert busy.preemptions > 0
    busy.run(Request("again", prompts[0], 40, sampling=params))
    assert busy.cached["again"] >= 16
    for request in requests:
        alone = InProcess(*model(4, 8), block_size=16)
        alone.run(request)
        assert busy.outputs[request.id] == alone.outputs[request.id]
        assert torch.equal(torch.stack(busy.logits[request.id]), torch.stack(alone.logits[request.id]))
    assert busy.outputs["again"] == busy.outputs["0"]
