"""The reference, Hugging Face transformers: the truth that greedy output and log probabilities are held to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.core.request import TokenLogprobs

if TYPE_CHECKING:  # the rule is also for machines without transformers
    from transformers import PreTrainedModel

MARGIN = 1e-3  # tokens whose logits lie closer than this are equally good


@torch.inference_mode()
def reference_logits(theirs: PreTrainedModel, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """Returns the reference's logits before each token of `output`, [output, vocabulary], in one pass over it."""
    return theirs(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]


def assert_greedy(logits: Tensor, output: Sequence[int]) -> None:
    """Each token is the reference's best after those before it, so by induction all are what it would generate."""
    chosen = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
    behind = logits.amax(dim=1) - chosen
    assert behind.max() <= MARGIN, f"token {int(behind.argmax())} is {float(behind.max()):.4f} behind the best"


def assert_logprobs(logits: Tensor, output: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
    """Those of the tokens that were chosen, and those of the best, in order."""
    expected = logits.log_softmax(dim=1)
    for row, token_id, ours in zip(expected, output, logprobs, strict=True):
        assert abs(ours.logprob - float(row[token_id])) < MARGIN
        best = row.topk(len(ours.top)).values
        for (other, logprob), wanted in zip(ours.top, best.tolist(), strict=True):
            assert abs(logprob - float(row[other])) < MARGIN
            assert abs(logprob - wanted) < MARGIN
