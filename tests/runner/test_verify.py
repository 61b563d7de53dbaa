"""Drafts and the rows they are judged by. What comes of them is distributed as what comes without."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from penstock.core.request import TokenLogprobs
from penstock.core.sampling import SamplingParams
from penstock.runner.sampler import sample
from penstock.runner.step_inputs import host_batch, pack
from penstock.runner.verify import choices, outcome
from penstock.sched.plan import Sampled, SampleSpec, Slice, StepPlan

GREEDY = SamplingParams(temperature=0.0)


def drafted(name: str, start: int, drafts: list[int], params: SamplingParams = GREEDY, history: int = 1) -> Slice:
    first = SampleSpec(params, [history], 1, start + 1)
    ahead = [SampleSpec(params, [history, *drafts[:n]], 1, start + 1 + n) for n in range(1, len(drafts) + 1)]
    return Slice(name, start, 1 + len(drafts), [history, *drafts], [0], first, 0, ahead=ahead)


def rows_of(*token_ids: int) -> list[Sampled]:
    return [Sampled([token_id], [TokenLogprobs(-float(token_id))]) for token_id in token_ids]


def test_drafts_hold_up_to_the_first_that_does_not() -> None:
    planned = [drafted("a", 3, [5, 6, 7])]
    assert outcome(planned, rows_of(5, 6, 9, 8)).sampled == [
        Sampled([5, 6, 9], [TokenLogprobs(-5.0), TokenLogprobs(-6.0), TokenLogprobs(-9.0)])
    ]
    assert outcome(planned, rows_of(4, 6, 7, 8)).sampled == [Sampled([4], [TokenLogprobs(-4.0)])]
    assert outcome(planned, rows_of(5, 6, 7, 8)).sampled[0].token_ids == [5, 6, 7, 8]  # type: ignore[union-attr]


def test_rows_go_to_their_slices() -> None:
    prompt = Slice("p", 0, 4, [1, 2, 3, 4], [1], None, 0)
    planned = [drafted("a", 3, []), prompt, drafted("b", 8, [7])]
    assert [spec.position for spec in choices(planned)] == [4, 9, 10]
    assert [s and s.token_ids for s in outcome(planned, rows_of(1, 7, 2)).sampled] == [[1], None, [7, 2]]
    assert host_batch(pack(StepPlan(planned)), torch.device("cpu")).logit_rows.tolist() == [0, 5, 6]


@pytest.mark.parametrize(
    ("params", "num_seeds"),
    [
        (SamplingParams(), 6000),
        (SamplingParams(temperature=0.8, top_k=6, top_p=0.9, min_p=0.03), 1000),
        (SamplingParams(presence_penalty=1.0, repetition_penalty=1.3, logit_bias={2: 1.5}), 1000),
    ],
    ids=["plain", "truncated", "penalties"],
)
def test_pairs_of_tokens_are_distributed_as_without_drafts(params: SamplingParams, num_seeds: int) -> None:
    """For many seeds at once: the first token from one row, the second from a row that depends on the first. With a
    draft the two come of one step if it holds, else of two; a pair comes as often as the model says."""
    vocabulary, begin = 8, 0
    table = torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(4)) * 1.5
    draft = int(table[begin].topk(2).indices[1])
    seeds = [_seeded(params, seed) for seed in range(num_seeds)]
    planned = [drafted(str(seed), 0, [draft], own, begin) for seed, own in enumerate(seeds)]
    logits = table[torch.tensor([begin, draft])].repeat(num_seeds, 1)
    found = [one.token_ids for one in outcome(planned, sample(logits, choices(planned))).sampled if one is not None]
    rejected = [(own, tokens[0]) for own, tokens in zip(seeds, found, strict=True) if len(tokens) == 1]
    second = sample(
        table[torch.tensor([token_id for _, token_id in rejected])],
        [SampleSpec(own, [begin, token_id], 1, 2) for own, token_id in rejected],
    )
    pairs = Counter(tuple(tokens) for tokens in found if len(tokens) == 2)
    num_accepted = sum(pairs.values())
    pairs.update((token_id, more.token_ids[0]) for (_, token_id), more in zip(rejected, second, strict=True))
    expected = _joint(table, params, begin)
    chance = sum(p for pair, p in expected.items() if pair[0] == draft)
    assert 0.1 < chance < 0.9
    assert abs(num_accepted / num_seeds - chance) < 4 * (chance * (1 - chance) / num_seeds) ** 0.5
    assert set(pairs) <= set(expected)
    likely = {pair: p * num_seeds for pair, p in expected.items() if p * num_seeds >= 5}
    chi_squared = sum((pairs[pair] - count) ** 2 / count for pair, count in likely.items())
    freedom = len(likely) - 1
    assert chi_squared < freedom + 4 * (2 * freedom) ** 0.5  # seeds are fixed: this holds or it does not


def _seeded(params: SamplingParams, seed: int) -> SamplingParams:
    fields = {name: getattr(params, name) for name in params.__struct_fields__}
    return SamplingParams(**{**fields, "seed": seed})


def _joint(table: torch.Tensor, params: SamplingParams, begin: int) -> dict[tuple[int, int], float]:
    """By the definitions, row by row."""
    joint = {}
    for first, p in enumerate(_chances(table[begin], params, [begin])):
        for second, q in enumerate(_chances(table[first], params, [begin, first])):
            if p * q > 0:
                joint[first, second] = p * q
    return joint


def _chances(row: torch.Tensor, params: SamplingParams, history: list[int]) -> list[float]:
    row = row.double().clone()
    for token_id in set(history):
        scale = params.repetition_penalty
        row[token_id] = row[token_id] / scale if row[token_id] > 0 else row[token_id] * scale
    for token_id in history[1:]:
        row[token_id] -= params.presence_penalty
    for token_id, bias in params.logit_bias.items():
        row[token_id] += bias
    chances = (row / params.temperature).softmax(dim=-1)
    order = chances.argsort(descending=True)
    if params.top_k is not None:
        chances[order[params.top_k :]] = 0
        chances /= chances.sum()
    before = chances[order].cumsum(dim=-1) - chances[order]
    chances[order[before >= params.top_p]] = 0
    chances[chances < params.min_p * chances.max()] = 0
    return [float(c) for c in chances / chances.sum()]
