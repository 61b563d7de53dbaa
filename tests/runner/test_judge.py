"""The judge forgives what rounding explains and nothing else."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from penstock.core.sampling import SamplingParams
from penstock.runner.sampler import sample
from penstock.sched.plan import SampleSpec
from tests.equality.reference import MARGIN
from tests.examples import examples
from tests.runner.judge import acceptable

VOCAB, ROWS = 300, 24

all_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.3, 0.8, 0.99]),
    top_k=st.sampled_from([None, 1, 7, 50]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    logit_bias=st.sampled_from([{}, {3: 4.0, 4: -2.0}]),
    seed=st.integers(0, 10_000),
)


def specs(params: SamplingParams, count: int = ROWS) -> list[SampleSpec]:
    return [SampleSpec(params, [1, 2, 3, 3], 2, position, banned_ids=(0, 5)) for position in range(count)]


def random_logits(seed: int, spread: float) -> torch.Tensor:
    return torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


@settings(max_examples=examples(15))
@given(params=all_params, seed=st.integers(0, 10_000), spread=st.sampled_from([0.01, 1.0, 4.0]))
def test_what_the_sampler_draws_from_slightly_different_logits_is_acceptable(
    params: SamplingParams, seed: int, spread: float
) -> None:
    logits = random_logits(seed, spread)
    noise = torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed + 1)) - 0.5
    allowed = acceptable(logits, specs(params))
    for nearby in (logits, logits + 0.99 * MARGIN * noise, logits + 0.99 * MARGIN * noise.sign() / 2):
        for row, sampled in zip(allowed, sample(nearby, specs(params)), strict=True):
            assert row[sampled.token_ids[0]]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(top_k=20),
        SamplingParams(top_p=0.8, temperature=0.7),
        SamplingParams(min_p=0.05),
    ],
    ids=str,
)
def test_hardly_ever_is_more_than_one_token_acceptable(params: SamplingParams) -> None:
    logits = random_logits(0, 3.0)
    allowed = acceptable(logits, specs(params))
    assert allowed.sum() <= 1.2 * ROWS
    exact = [sampled.token_ids[0] for sampled in sample(logits, specs(params))]
    assert allowed[range(ROWS), exact].all()
    assert not allowed[:, [0, 5]].any()  # banned


def test_a_greedy_token_further_behind_than_the_margin_is_refused() -> None:
    logits = torch.zeros(1, 4)
    logits[0, 1:] = torch.tensor([2.0, 2.0 - 0.9 * MARGIN, 2.0 - 1.1 * MARGIN])
    params = SamplingParams(temperature=0.0)
    assert acceptable(logits, [SampleSpec(params, [0], 1, 1)]).tolist() == [[False, True, True, False]]
