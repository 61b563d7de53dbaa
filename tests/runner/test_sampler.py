from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from penstock.core.sampling import SamplingParams, keyed_uniform
from penstock.runner.sampler import sample
from penstock.sched.plan import SampleSpec
from tests.examples import examples
from tests.runner.reference_sampling import assert_drawn_from, distribution

LOGITS = [1.5, -0.3, 0.9, 0.0, 2.2, -1.0, 1.4, 0.4]
GREEDY = SamplingParams(temperature=0.0)


def spec(
    params: SamplingParams,
    position: int = 0,
    history: Sequence[int] = (0,),
    prompt_len: int = 1,
    banned: Sequence[int] = (),
) -> SampleSpec:
    return SampleSpec(params, history, prompt_len, position, banned)


def choose(logits: Sequence[float], *specs: SampleSpec) -> list[int]:
    """One token for each spec, all from the same logits."""
    rows = torch.tensor(logits).repeat(len(specs), 1)
    return [sampled.token_ids[0] for sampled in sample(rows, list(specs))]


def draw(logits: Sequence[float], params: SamplingParams, count: int) -> list[int]:
    return choose(logits, *(spec(params, position) for position in range(count)))


# -- what may come


def test_only_allowed_tokens_come_also_where_tokens_are_drawn() -> None:
    assert choose(LOGITS, spec(SamplingParams(temperature=0.0, allowed_ids=[1, 3, 5]))) == [3]
    assert set(draw(LOGITS, SamplingParams(allowed_ids=[1, 3, 5]), 50)) == {1, 3, 5}
    assert set(draw(LOGITS, SamplingParams(allowed_ids=[1, 3], top_k=1), 20)) == {3}


def test_a_bad_word_does_not_end_and_its_beginning_may_come() -> None:
    params = SamplingParams(temperature=0.0, bad_words=[[7, 4], [6]])
    assert params.looks_back
    assert choose(LOGITS, spec(params, history=[7], prompt_len=1)) == [4], "the prompt is no part of the answer"
    assert choose(LOGITS, spec(params, history=[0, 7], prompt_len=1)) == [0], "6 is a bad word by itself"
    assert not SamplingParams(bad_words=[[6]]).looks_back


# -- the random numbers ----------------------------------------------------------------------------------------------


def test_uniforms_lie_in_the_unit_interval_and_are_even_over_positions_and_over_seeds() -> None:
    even = np.full(50, 1 / 50)
    for numbers in (
        [keyed_uniform(7, position) for position in range(10_000)],
        [keyed_uniform(seed, 7) for seed in range(10_000)],
        [keyed_uniform(-seed, seed) for seed in range(10_000)],
    ):
        assert all(0.0 <= number < 1.0 for number in numbers)
        assert_drawn_from(even, [int(number * 50) for number in numbers])


@pytest.mark.parametrize(("seed_step", "position_step"), [(0, 1), (1, 0), (1, 1), (1, -1), (2**32, 0), (2**63, 0)])
def test_uniforms_of_neighbours_are_independent(seed_step: int, position_step: int) -> None:
    """Successive positions of one stream, and the streams of siblings, whose seeds follow each other."""
    cells = []
    for i in range(10_000):
        seed, position = i % 100, 200 + i // 100
        one, other = keyed_uniform(seed, position), keyed_uniform(seed + seed_step, position + position_step)
        cells.append(int(one * 6) * 6 + int(other * 6))
    assert_drawn_from(np.full(36, 1 / 36), cells)


def test_a_uniform_is_the_same_on_every_replica_and_in_every_version() -> None:
    numbers = [keyed_uniform(0, 0), keyed_uniform(-(2**63), 1), keyed_uniform(2**63 - 1, 10**6)]
    assert numbers == [0.1872752474575039, 0.5253390433905382, 0.4874036577843065]


# -- distributions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_plain_sampling_follows_the_softmax(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=1)
    assert_drawn_from(distribution(LOGITS, params), draw(LOGITS, params, 10_000))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=1, seed=4),
        SamplingParams(top_k=3, seed=5),
        SamplingParams(top_k=100, seed=6),
        SamplingParams(top_p=0.6, seed=7),
        SamplingParams(top_p=1e-6, seed=8),
        SamplingParams(min_p=0.3, seed=9),
        SamplingParams(min_p=1.0, seed=10),
        SamplingParams(top_k=5, top_p=0.8, seed=11),
        SamplingParams(top_p=0.9, min_p=0.2, seed=12),
        SamplingParams(temperature=1.7, top_k=6, top_p=0.9, min_p=0.15, seed=13),
    ],
    ids=str,
)
def test_truncated_sampling_follows_what_truncation_leaves(params: SamplingParams) -> None:
    expected = distribution(LOGITS, params)
    is_certain = (expected > 0).sum() == 1
    assert_drawn_from(expected, draw(LOGITS, params, 100 if is_certain else 1000))


def test_a_nucleus_larger_than_the_short_sort_is_sampled_whole() -> None:
    logits = [0.001 * i for i in range(1000)]
    params = SamplingParams(top_p=0.7, seed=1)
    expected = distribution(logits, params)
    assert (expected > 0).sum() > 500
    tens = [token_id // 10 for token_id in draw(logits, params, 1000)]
    boundary = int(np.flatnonzero(expected)[0])
    assert min(tens) >= boundary // 10
    assert_drawn_from(expected.reshape(-1, 10).sum(axis=1)[30:], [ten - 30 for ten in tens])


def test_a_tail_that_min_p_keeps_beyond_the_short_sort_is_sampled() -> None:
    logits = [1.0] + [0.0] * 499
    params = SamplingParams(min_p=0.3, seed=1)
    drawn = draw(logits, params, 1000)
    assert len(set(drawn)) > 400
    assert_drawn_from(np.array([math.e, 499]) / (math.e + 499), [min(token_id, 1) for token_id in drawn])


def test_a_forbidden_token_is_never_drawn_even_where_the_settings_would_keep_it() -> None:
    for params in (SamplingParams(), SamplingParams(top_k=5), SamplingParams(top_p=0.999)):
        specs = [spec(params, position, banned=(0, 2, 4, 6, 7)) for position in range(300)]
        assert set(choose(LOGITS, *specs)) == {1, 3, 5}


def test_a_large_vocabulary() -> None:
    logits = torch.randn(4, 150_000, generator=torch.Generator().manual_seed(1)) * 4
    for params in (SamplingParams(), SamplingParams(top_p=0.95), SamplingParams(temperature=2.0, top_p=0.99), GREEDY):
        tokens = [s.token_ids[0] for s in sample(logits, [spec(params, i) for i in range(4)])]
        probabilities = (logits / (params.temperature or 1.0)).softmax(dim=1)
        for row, token_id in zip(probabilities, tokens, strict=True):
            assert float(row[row > row[token_id]].sum()) < params.top_p


# -- greedy, bias, bans ----------------------------------------------------------------------------------------------


def test_greedy_takes_the_best_whatever_the_seed_and_the_truncation() -> None:
    specs = [spec(SamplingParams(temperature=0.0, seed=s, top_k=2, top_p=0.1), s) for s in range(20)]
    assert choose(LOGITS, *specs) == [4] * 20


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_a_bias_of_100_forces_a_token_and_one_of_minus_100_bans_it(temperature: float) -> None:
    for position in range(60):
        forced = SamplingParams(temperature=temperature, logit_bias={5: 100.0}, seed=1)
        banned = SamplingParams(temperature=temperature, logit_bias={4: -100.0, 0: -100.0}, seed=1)
        tokens = choose(LOGITS, spec(forced, position), spec(banned, position))
        assert tokens[0] == 5
        assert tokens[1] not in (0, 4)


def test_a_small_bias_shifts_the_distribution() -> None:
    params = SamplingParams(logit_bias={1: 1.5, 4: -2.0}, seed=3)
    shifted = list(LOGITS)
    shifted[1] += 1.5
    shifted[4] -= 2.0
    assert_drawn_from(distribution(shifted, params), draw(LOGITS, params, 1500))


def test_banned_tokens_are_out_even_if_a_bias_would_force_them() -> None:
    params = SamplingParams(temperature=0.0, logit_bias={4: 100.0})
    assert choose(LOGITS, spec(params, banned=(4,)), spec(params), spec(GREEDY, banned=[4, 0])) == [0, 4, 6]


# -- penalties -------------------------------------------------------------------------------------------------------


def penalised(logits: Sequence[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    counts = Counter(output)
    out = list(logits)
    for token_id in {*prompt, *output}:
        value = out[token_id]
        out[token_id] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token_id, count in counts.items():
        out[token_id] -= params.presence_penalty + params.frequency_penalty * count
    return out


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(presence_penalty=1.2, seed=1),
        SamplingParams(frequency_penalty=0.5, seed=2),
        SamplingParams(repetition_penalty=1.8, seed=3),
        SamplingParams(repetition_penalty=0.6, presence_penalty=-1.0, frequency_penalty=0.3, seed=4),
    ],
    ids=str,
)
def test_penalties(params: SamplingParams) -> None:
    prompt, output = [0, 1, 1, 3], [4, 4, 4, 6, 1]
    specs = [spec(params, position, [*prompt, *output], len(prompt)) for position in range(1500)]
    expected = distribution(penalised(LOGITS, params, prompt, output), params)
    assert_drawn_from(expected, choose(LOGITS, *specs))


def test_presence_and_frequency_look_at_the_output_alone() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    assert choose(LOGITS, spec(params, 3, [4, 4, 4], prompt_len=3), spec(params, 3, [4, 4, 4], prompt_len=2)) == [4, 0]


# -- log probabilities -----------------------------------------------------------------------------------------------


def test_logprobs_are_the_models_own_whatever_reshaped_the_choice() -> None:
    expected = torch.tensor(LOGITS).log_softmax(dim=0)
    params = SamplingParams(temperature=0.3, top_k=2, logit_bias={5: 100.0}, presence_penalty=1.0, num_logprobs=3)
    (sampled,) = sample(torch.tensor([LOGITS]), [spec(params, history=[4, 5])])
    assert sampled.token_ids == [5]
    assert sampled.logprobs is not None
    (logprobs,) = sampled.logprobs
    assert logprobs.logprob == pytest.approx(float(expected[5]), abs=1e-6)
    assert [token_id for token_id, _ in logprobs.top] == [4, 0, 6]
    assert [value for _, value in logprobs.top] == pytest.approx([float(expected[i]) for i in (4, 0, 6)], abs=1e-6)


def test_logprobs_are_given_to_those_who_asked() -> None:
    specs = [spec(SamplingParams(num_logprobs=count)) for count in (None, 0, 2)]
    none, chosen, two = (s.logprobs for s in sample(torch.tensor([LOGITS] * 3), specs))
    assert none is None
    assert chosen is not None
    assert chosen[0].top == []
    assert two is not None
    assert len(two[0].top) == 2


def test_the_models_logits_are_left_as_they_were() -> None:
    logits = torch.tensor([LOGITS] * 2)
    sample(logits, [spec(SamplingParams(logit_bias={1: 5.0})), spec(GREEDY, banned=(4,))])
    assert torch.equal(logits, torch.tensor([LOGITS] * 2))


# -- one batch -------------------------------------------------------------------------------------------------------

floats = st.floats(-8, 8, width=32)
settings_of_a_row = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    top_p=st.sampled_from([0.5, 0.9, 1.0]),
    top_k=st.sampled_from([None, 1, 3, 300]),
    min_p=st.sampled_from([0.0, 0.1]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([{}, {2: 3.0}]),
    seed=st.integers(-(2**63), 2**63 - 1),
    num_logprobs=st.sampled_from([None, 0, 4]),
)
rows = st.builds(
    lambda params, position, history, banned: spec(params, position, history, 1, banned),
    settings_of_a_row,
    st.integers(0, 1000),
    st.lists(st.integers(0, 399), min_size=1, max_size=6),
    st.sampled_from([(), (3, 5)]),
)


@settings(max_examples=examples(25))
@given(specs=st.lists(rows, min_size=2, max_size=6), seed=st.integers(0, 10))
def test_a_row_gets_the_same_token_whatever_the_batch_around_it(specs: list[SampleSpec], seed: int) -> None:
    logits = torch.randn(len(specs), 400, generator=torch.Generator().manual_seed(seed)) * 2
    together = sample(logits, specs)
    assert together == [sample(row[None], [spec])[0] for row, spec in zip(logits, specs, strict=True)]
    assert together == sample(logits.flip(0), specs[::-1])[::-1]
