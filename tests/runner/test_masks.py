from dataclasses import dataclass

import pytest
import torch

from penstock.core.sampling import SamplingParams
from penstock.runner.masks import apply_masks
from penstock.runner.sampler import sample
from penstock.sched.plan import SampleSpec
from tests.devices import NEEDS_GPU

VOCAB = 101  # no multiple of eight

DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]


@dataclass
class Only:
    token_ids: set[int]

    def bits(self) -> bytes:
        return sum(1 << token_id for token_id in self.token_ids).to_bytes(-(-VOCAB // 8), "little")


def spec(mask: set[int] | None, position: int = 0, **params: object) -> SampleSpec:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return SampleSpec(sampling, [1, 2, 3], 2, position, mask=Only(mask) if mask is not None else None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("masks", [[{0, 7, 8, 100}], [{5}, {6, 99}, set(range(VOCAB))], [None, {64}, None]])
def test_all_but_what_a_mask_allows_becomes_impossible(masks: list[set[int] | None], device: str) -> None:
    logits = torch.randn(len(masks), VOCAB, device=device)
    before = logits.clone()
    apply_masks(logits, [spec(mask) for mask in masks])
    for row, was, mask in zip(logits, before, masks, strict=True):
        kept = set(range(VOCAB)) if mask is None else mask
        for token_id in range(VOCAB):
            assert row[token_id] == (was[token_id] if token_id in kept else -torch.inf)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 2.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 1.0, "logit_bias": {50: 100.0}},
        {"temperature": 1.0, "repetition_penalty": 1.5, "presence_penalty": 1.0},
    ],
)
def test_what_is_chosen_is_allowed_whatever_else_is_wanted(params: dict[str, object]) -> None:
    logits = torch.randn(64, VOCAB)
    allowed = {3, 17, 96}
    chosen = sample(logits, [spec(allowed, position, seed=9, **params) for position in range(64)])
    assert {one.token_ids[0] for one in chosen} <= allowed


def test_log_probabilities_are_the_models_own() -> None:
    logits = torch.randn(1, VOCAB)
    (chosen,) = sample(logits, [spec({40}, temperature=0.0, num_logprobs=2)])
    assert chosen.token_ids == [40]
    assert chosen.logprobs is not None
    assert chosen.logprobs[0].logprob == pytest.approx(float(logits[0].log_softmax(dim=-1)[40]))


def test_free_rows_are_what_they_are_without_guided_ones() -> None:
    logits = torch.randn(3, VOCAB)
    free = spec(None, seed=4)
    alone = sample(logits[1:2].clone(), [free])
    among = sample(logits, [spec({1}), free, spec({2})])
    assert among[1] == alone[0]
