"""A model whose layers are in every format there is says what the numbers say that they stand for, and says it whatever
else is in the batch."""

from __future__ import annotations

import pytest
import torch

from penstock.core.model_config import ModelConfig
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.model.loading import random_model
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.native import NativeOps
from penstock.model.quantized import plain
from tests.equality.formats import FORMATS, in_turn
from tests.equality.inprocess import InProcess
from tests.model.paged import PagedDriver

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=300,
    hidden_size=128,
    intermediate_size=192,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    context_length=128,
)
LOGIT_ERROR = 0.03  # at most, of all logits' deviation from their mean: what rounding activations to 8 bits costs


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    try:
        return NativeOps("float32", threads=2, keeps=frozenset({4, 8}))
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))


def test_mixed_model_says_what_its_widened_twin_says(ops: NativeOps) -> None:
    quantize = in_turn()
    exact = NativeOps("float32", threads=2)
    mixed = PagedDriver(random_model(CONFIG, ops, quantize=quantize), ops, block_size=8)
    twin = PagedDriver(
        random_model(CONFIG, exact, quantize=lambda weight: plain(quantize(weight))), exact, block_size=8
    )
    prompt = torch.randint(0, CONFIG.vocab_size, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    found, expected = mixed.prefill(prompt), twin.prefill(prompt)
    spread = expected - expected.mean(1, keepdim=True)
    error = float((found - expected).norm() / spread.norm())
    assert 0 < error < LOGIT_ERROR


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_near_what_it_stands_for(name: str, ops: NativeOps) -> None:
    torch.manual_seed(0)
    kept, x = FORMATS[name](torch.randn(48, 256)), torch.randn(20, 256)
    expected = x @ plain(kept).T
    assert float((ops.linear(kept)(x) - expected).norm() / expected.norm()) < 0.01


def test_an_answer_does_not_depend_on_who_else_is_in_the_batch(ops: NativeOps) -> None:
    model = random_model(CONFIG, ops, quantize=in_turn())
    drawn = torch.randint(0, CONFIG.vocab_size, (200,), generator=torch.Generator().manual_seed(2)).tolist()
    prompts = [drawn[:40], drawn[:17] + drawn[50:60], drawn[70:71], drawn[80:110]]
    params = SamplingParams(temperature=0.9, seed=5)
    requests = [Request(f"r{i}", prompt, 12, sampling=params) for i, prompt in enumerate(prompts)]
    together = InProcess(model, ops, chunk_tokens=23, num_blocks=40)
    together.run(*requests, apart=2)
    for request in requests:
        alone = InProcess(model, ops)
        alone.run(request)
        assert together.outputs[request.id] == alone.outputs[request.id]
        assert torch.equal(torch.stack(together.logits[request.id]), torch.stack(alone.logits[request.id]))
