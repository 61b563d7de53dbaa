"""What Hugging Face transformers would have said: the truth that greedy output and log probabilities are held to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.core.request import TokenLogprobs

MARGIN = 1e-3  # tokens whose logits lie closer than this are equally good


@torch.inference_mode()
def reference_logits(theirs: PreTrainedModel, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """What the reference thinks before each token of `output`, [output, vocabulary], in one pass over all of it."""
    return theirs(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]


def assert_greedy(theirs: PreTrainedModel, prompt: Sequence[int], output: Sequence[int]) -> None:
    """Each token is the reference's best after those before it, so by induction all are what it would generate."""
    logits = reference_logits(theirs, prompt, output)
    chosen = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
    behind = logits.amax(dim=1) - chosen
    assert behind.max() <= MARGIN, f"token {int(behind.argmax())} is {float(behind.max()):.4f} behind the best"


def assert_generated(theirs: PreTrainedModel, prompt: Sequence[int], output: Sequence[int]) -> None:
    """As above, but against the words of `generate` itself."""
    ids = torch.tensor([list(prompt)])
    generated = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(output), do_sample=False, pad_token_id=0
    )
    if generated[0, len(prompt) :].tolist() != list(output):
        assert_greedy(theirs, prompt, output)


def assert_logprobs(
    theirs: PreTrainedModel, prompt: Sequence[int], output: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> None:
    expected = reference_logits(theirs, prompt, output).log_softmax(dim=1)
    for row, token_id, ours in zip(expected, output, logprobs, strict=True):
        assert abs(ours.logprob - float(row[token_id])) < MARGIN
        for place, (other, logprob) in enumerate(ours.top):
            assert abs(logprob - float(row[other])) < MARGIN
            assert abs(logprob - float(row.topk(place + 1).values[-1])) < MARGIN
