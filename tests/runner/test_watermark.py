from __future__ import annotations

import random
from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.core.watermark import Scheme, Seeding, Watermark
from penstock.runner.sampler import sample
from penstock.runner.watermark import apply_watermarks, fresh_context
from penstock.sched.plan import SampleSpec
from penstock.sched.sample_specs import choice_of, choices_after
from penstock.sched.sequence import Sequence as LiveSequence
from penstock.text.watermark import Verdict, detect
from tests.runner.reference_sampling import assert_drawn_from, distribution
from tests.runner.test_masks import Only

VOCAB = 101
SECRET = bytes(range(32))
GREEN, SELF = Watermark(SECRET), Watermark(SECRET, seeding=Seeding.SELF)
GUMBEL = Watermark(SECRET, Scheme.GUMBEL)
PROMPT, OUTPUT = [1, 2, 3], [9, 8, 7, 6, 5]


def spec(
    mark: Watermark | None, output: Sequence[int] = OUTPUT, mask: set[int] | None = None, **params: object
) -> SampleSpec:
    history = [*PROMPT, *output]
    sampling = SamplingParams(watermark=mark, **params)  # type: ignore[arg-type]
    return SampleSpec(sampling, history, len(PROMPT), len(history), mask=Only(mask) if mask is not None else None)


def marked(logits: Tensor, *specs: SampleSpec) -> Tensor:
    logits = logits.clone()
    apply_watermarks(logits, list(specs))
    return logits


@pytest.mark.parametrize("mark", [GREEN, SELF])
def test_what_the_detector_calls_green_gains_and_nothing_else_changes(mark: Watermark) -> None:
    logits = torch.randn(1, VOCAB)
    gains = (marked(logits, spec(mark)) - logits)[0]
    for token_id in range(VOCAB):
        is_green = detect([*OUTPUT[-4:], token_id], mark).score == 1
        assert gains[token_id] == pytest.approx(mark.delta if is_green else 0.0, abs=1e-5)
    assert 10 < (gains > 1).sum() < 45


@pytest.mark.parametrize("mark", [GREEN, SELF, GUMBEL])
def test_the_first_tokens_of_an_answer_are_not_marked(mark: Watermark) -> None:
    logits = torch.randn(1, VOCAB)
    assert torch.equal(marked(logits, spec(mark, OUTPUT[:3])), logits)
    assert not torch.equal(marked(logits, spec(mark, OUTPUT[:4])), logits)


@pytest.mark.parametrize("mark", [GREEN, SELF, GUMBEL])
def test_what_is_marked_does_not_depend_on_the_prompt(mark: Watermark) -> None:
    logits = torch.randn(1, VOCAB)
    other = SampleSpec(SamplingParams(watermark=mark), [44, *OUTPUT], 1, 6)
    assert torch.equal(marked(logits, spec(mark)), marked(logits, other))


def test_rows_are_what_they_are_alone() -> None:
    logits = torch.randn(5, VOCAB)
    specs = [spec(None), spec(GREEN, OUTPUT[::-1]), spec(GUMBEL), spec(SELF), spec(Watermark(SECRET, delta=7.0))]
    together = marked(logits, *specs)
    for i, one in enumerate(specs):
        assert torch.equal(together[i : i + 1], marked(logits[i : i + 1], one))
    assert torch.equal(together[0], logits[0])


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.9}, {"top_k": 4}, {"top_p": 0.8}, {"temperature": 2.0, "min_p": 0.3}]
)
def test_over_all_keys_gumbel_draws_by_the_models_own_distribution(params: dict[str, object]) -> None:
    logits = [1.5, -0.3, 0.9, 0.0, 2.2, -1.0, 1.4, 0.4]
    rng = random.Random(11)
    keys = [Watermark(rng.randbytes(32), Scheme.GUMBEL) for _ in range(450)]
    rows = torch.tensor(logits).repeat(len(keys), 1)
    chosen = [one.token_ids[0] for one in sample(rows, [spec(key, **params) for key in keys])]
    assert_drawn_from(distribution(logits, SamplingParams(**params)), chosen)  # type: ignore[arg-type]


def test_gumbel_takes_the_place_of_the_seed_but_where_the_context_is_not_fresh() -> None:
    rows = torch.zeros(40, VOCAB)
    fresh = sample(rows, [spec(GUMBEL, seed=seed) for seed in range(40)])
    assert len({one.token_ids[0] for one in fresh}) == 1
    again = sample(rows, [spec(GUMBEL, OUTPUT * 2, seed=seed) for seed in range(40)])
    plain = sample(rows, [spec(None, OUTPUT * 2, seed=seed) for seed in range(40)])
    assert again == plain


def test_gumbel_has_nothing_to_do_where_there_is_no_chance() -> None:
    logits = torch.randn(1, VOCAB)
    assert torch.equal(marked(logits, spec(GUMBEL, temperature=0.0)), logits)


@pytest.mark.parametrize("mark", [GREEN, SELF, GUMBEL])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_what_a_guide_allows_can_come(mark: Watermark, temperature: float) -> None:
    logits = torch.randn(30, VOCAB)
    allowed = {3, 50, 97}
    specs = [spec(mark, [i, 8, 7, 6, 5], mask=allowed, temperature=temperature) for i in range(30)]
    assert {one.token_ids[0] for one in sample(logits, specs)} <= allowed


def test_log_probabilities_are_those_of_the_unmarked_model() -> None:
    logits = torch.randn(1, VOCAB)
    for mark in (GREEN, GUMBEL):
        (one,) = sample(logits, [spec(mark, num_logprobs=3)])
        own = logits[0].log_softmax(dim=-1)
        assert one.logprobs is not None
        assert one.logprobs[0].logprob == pytest.approx(float(own[one.token_ids[0]]), abs=1e-5)
        assert [token_id for token_id, _ in one.logprobs[0].top] == own.topk(3).indices.tolist()


@pytest.mark.parametrize(
    ("mark", "params"),
    [
        (GREEN, {}),
        (GREEN, {"temperature": 0.0}),
        (GREEN, {"top_p": 0.9, "repetition_penalty": 1.1}),
        (SELF, {}),
        (GUMBEL, {}),
        (GUMBEL, {"top_k": 20, "frequency_penalty": 0.5}),
    ],
)
def test_marked_answers_are_found_by_their_own_key_only(mark: Watermark, params: dict[str, object]) -> None:
    model = torch.tensor(np.random.default_rng(2).normal(size=(VOCAB, VOCAB)), dtype=torch.float32)
    output = list(OUTPUT[:1])
    for _ in range(150):
        (one,) = sample(model[output[-1]][None], [spec(mark, output, seed=1, **params)])
        output += one.token_ids
    assert detect(output, mark).verdict() is Verdict.FOUND
    other = Watermark(SECRET[::-1], mark.scheme, seeding=mark.seeding)
    assert detect(output, other).verdict() is not Verdict.FOUND


@pytest.mark.parametrize("mark", [GREEN, SELF, GUMBEL])
def test_a_token_after_drafts_is_marked_as_if_they_were_its_own(mark: Watermark) -> None:
    logits = torch.randn(1, VOCAB)
    request = Request("r", PROMPT, 99, SamplingParams(watermark=mark), output_ids=OUTPUT[:2])
    sequence = LiveSequence(request, arrival_s=0.0, order=0, block_size=4)
    (*_, ahead) = choices_after(sequence, choice_of(sequence), OUTPUT[2:])
    assert torch.equal(marked(logits, ahead), marked(logits, spec(mark)))


@given(st.lists(st.sampled_from([0, 1, 2, 256, 2**16]), max_size=40), st.integers(1, 4))
def test_a_context_is_fresh_if_it_has_not_been_there_before(output: list[int], width: int) -> None:
    windows = [output[i : i + width] for i in range(len(output) - width + 1)]
    is_fresh = bool(windows) and windows[-1] not in windows[:-1]
    assert fresh_context(output, width) == (windows[-1] if is_fresh else None)
