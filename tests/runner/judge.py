"""Whether an answer is right: each token is one that the plain torch reference might have chosen after those before.

The reference reads prompt and answer in one pass, so a tie that went the other way is no end of the comparison: what
follows is held to the reference's opinion of that continuation. Two engines whose answers both pass can differ only
where the reference is undecided.

Kernels add numbers in another order, so a logit may come out a little different: two of them may change places if they
lie within MARGIN. That is all that is forgiven, for greedy and for sampled tokens alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.core.request import FinishReason
from penstock.core.sampling import SamplingParams, keyed_uniform
from penstock.hub.checkpoint import Checkpoint
from penstock.model.loading import load_model
from penstock.model.ops.reference import ReferenceOps
from penstock.model.shard import Shard
from penstock.model.stages import Stage
from penstock.model.states import state_shape
from penstock.runner.sampler import reshape, truncates
from penstock.sched.plan import SampleSpec
from tests.equality.reference import MARGIN, assert_logprobs
from tests.model.paged import PagedSequence, kv_shape, make_batch, with_states
from tests.runner.clients import Answer, Clients

BLOCK_SIZE = 16


class Judge:
    def __init__(self, checkpoint: Checkpoint, *, longest: int, device: str = "cpu") -> None:
        """`longest` is the most tokens that prompt and answer have together."""
        torch.set_float32_matmul_precision("highest")  # no TF32
        self._ops = ReferenceOps(device)
        self._model = load_model(checkpoint, self._ops)
        self._blocks = list(range(-(-longest // BLOCK_SIZE)))
        self._kv = self._ops.allocate_kv(kv_shape(checkpoint.config, len(self._blocks), BLOCK_SIZE))
        shape = state_shape(checkpoint.config, Shard(), Stage())
        self._states = shape.allocate(1, self._ops.device) if shape is not None else []

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
        """Returns the reference's logits before each token of `output`, [output, vocabulary], on the CPU."""
        sequence = PagedSequence([*prompt, *output[:-1]], self._blocks)
        work = [(sequence, len(sequence.token_ids))]
        batch = with_states(make_batch(work, device=self._ops.device, every_row=True), work, self._states)
        batch = replace(batch, logit_rows=batch.logit_rows[len(prompt) - 1 :])
        with sdpa_kernel(SDPBackend.MATH):  # others may round more than float32 does
            return self._model(batch, self._kv).cpu()

    def check_all(self, clients: Clients) -> int:
        return sum(self.check(answer) for answer in clients.finished.values())

    def check(self, answer: Answer) -> int:
        """Every token, every log probability and the end. How many tokens another choice was possible for."""
        request, output = answer.request, answer.token_ids
        logits = self.logits(request.prompt_ids, output)
        allowed = acceptable(logits, sample_specs(answer))
        wrong = [i for i, token_id in enumerate(output) if not allowed[i, token_id]]
        assert not wrong, _complaint(answer, wrong[0], logits, allowed)
        if request.sampling.num_logprobs is not None:
            assert_logprobs(logits, output, answer.logprobs)
        assert answer.finish is _expected_finish(answer), f"{request.id} ended by {answer.finish}"
        return int((allowed.sum(dim=1) > 1).sum())


def sample_specs(answer: Answer) -> list[SampleSpec]:
    """Returns how each of the answer's tokens was to be chosen."""
    request, prompt_len = answer.request, len(answer.request.prompt_ids)
    tokens = [*request.prompt_ids, *answer.token_ids]
    return [
        SampleSpec(
            params=request.sampling,
            history=tokens[: prompt_len + i],
            prompt_len=prompt_len,
            position=prompt_len + i,
            banned_ids=request.stop_token_ids if i < request.min_tokens else (),
        )
        for i in range(len(answer.token_ids))
    ]


def acceptable(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """Returns which tokens a row may have if every logit is off by half of MARGIN at most: [rows, vocabulary] bool.

    The specs are those of one request.
    """
    params = specs[0].params
    logits = logits.clone()
    for row, spec in zip(logits, specs, strict=True):
        reshape(row, spec)
    if params.is_greedy:
        return logits >= logits.amax(dim=1, keepdim=True) - MARGIN
    uniform = torch.tensor([[keyed_uniform(spec.params.seed, spec.position)] for spec in specs], dtype=torch.float64)
    scaled, margin = logits.double() / params.temperature, MARGIN / params.temperature
    if truncates(params):
        return _drawable_of_best(scaled, params, uniform, margin)
    return _drawable(scaled, uniform, margin)


def _slip(margin: float) -> float:
    """Returns how far such errors can move the mass of a set of tokens, as a share of all.

    It is farthest if they raise the set and lower the rest by half of the margin: F(1 - F) margin, F being the mass.
    """
    return margin / 4


def _drawable(scaled: Tensor, uniform: Tensor, margin: float) -> Tensor:
    """Tokens lie end to end, by id; the one that the uniform number falls on is drawn."""
    probabilities = scaled.softmax(dim=1)
    ends = probabilities.cumsum(dim=1)
    starts = ends - probabilities
    return (starts - _slip(margin) <= uniform) & (uniform <= ends + _slip(margin)) & (probabilities > 0)


def _drawable_of_best(scaled: Tensor, params: SamplingParams, uniform: Tensor, margin: float) -> Tensor:
    """The best lie end to end, best first; how many of them is top-k's, then top-p's, then min-p's choice.

    A token has a range of ranks, since it may change places with those within the margin; and how many are kept is a
    range too, if a rank lies at the edge of what is kept.
    """
    values, ids = scaled.sort(dim=1, descending=True)
    rising = values.neg()
    first_rank = torch.searchsorted(rising, rising - margin)
    end_rank = torch.searchsorted(rising, rising + margin, right=True)

    vocab_size = values.shape[1]
    top_k = min(params.top_k or vocab_size, vocab_size)
    shares = (values - values[:, :top_k].logsumexp(dim=1, keepdim=True)).exp()
    mass = F.pad(shares.cumsum(dim=1), (1, 0))  # [rows, n]: of the n best
    floor = values[:, :1] + (math.log(params.min_p) if params.min_p else -math.inf)

    def num_kept(sign: int) -> Tensor:
        """[rows, 1]; at most, or at least."""
        keep = (mass[:, :-1] - sign * _slip(margin) < params.top_p) & (values >= floor - sign * margin)
        return keep[:, :top_k].sum(dim=1, keepdim=True).clamp(min=1)

    most, least = num_kept(+1), num_kept(-1)
    starts = mass.gather(1, first_rank) / mass.gather(1, most)
    ends = mass.gather(1, end_rank) / mass.gather(1, least)
    drawable = (starts - _slip(margin) <= uniform) & (uniform <= ends + _slip(margin)) & (first_rank < most)
    drawable &= values > -math.inf
    return torch.zeros_like(drawable).scatter(1, ids, drawable)


def _expected_finish(answer: Answer) -> FinishReason | None:
    """None: it should have ended before, or not yet."""
    request, count = answer.request, len(answer.token_ids)
    stops = [i for i, token in enumerate(answer.token_ids, 1) if token in request.stop_token_ids]
    late = [i for i in stops if i > request.min_tokens]
    if late:
        return FinishReason.STOP if late[0] == count else None
    return FinishReason.LENGTH if count == request.max_tokens else None


def _complaint(answer: Answer, index: int, logits: Tensor, allowed: Tensor) -> str:
    token_id, request = answer.token_ids[index], answer.request
    behind = float(logits[index].max() - logits[index, token_id])
    wanted = allowed[index].nonzero().flatten().tolist()[:5]
    return (
        f"{request.id}: token {index} of {len(answer.token_ids)} is {token_id}, {behind:.4f} behind the best; the "
        f"reference wants {wanted}. Its prompt is {len(request.prompt_ids)} long, {answer.cached_tokens} of it cached; "
        f"{request.sampling}"
    )
