"""Choosing tokens: every row of a batch by its own settings.

Each row draws one uniform number keyed by (seed, position) and inverts its distribution's cumulative sum, so what a
request gets does not depend on its neighbours. Rows are only ever treated row by row or by row-wise operations.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from penstock.core.request import TokenLogprobs
from penstock.core.sampling import SamplingParams, keyed_uniform
from penstock.runner.masks import apply_masks
from penstock.runner.nucleus import nucleus, truncates
from penstock.runner.watermark import apply_watermarks
from penstock.sched.plan import Sampled, SampleSpec


def sample(logits: Tensor, specs: list[SampleSpec]) -> list[Sampled]:
    """One token per row of `logits`, [rows, vocabulary] float32."""
    raw = logits
    if any(reshapes(spec) for spec in specs):
        logits = logits.clone()  # log probabilities are reported as the model gave them
        for row, spec in zip(logits, specs, strict=True):
            reshape(row, spec)
        apply_masks(logits, specs)
        apply_watermarks(logits, specs)
    chosen = _best(logits)
    drawn = [i for i, spec in enumerate(specs) if not spec.params.is_greedy]
    if drawn:
        for i, token_id in zip(drawn, _draw(logits[drawn], [specs[i] for i in drawn]), strict=True):
            chosen[i] = token_id
    return [
        Sampled([token_id], _logprobs(row, token_id, spec.params.num_logprobs))
        for row, token_id, spec in zip(raw, chosen, specs, strict=True)
    ]


def _best(logits: Tensor) -> list[int]:
    # numpy finds it ten times faster in a CPU's tensor: torch looks at one number at a time.
    found: list[int] = (logits.numpy().argmax(axis=1) if logits.device.type == "cpu" else logits.argmax(dim=1)).tolist()
    return found


def reshapes(spec: SampleSpec) -> bool:
    """Whether a row is to be changed before anything is chosen from it."""
    params = spec.params
    return bool(
        spec.mask is not None
        or params.logit_bias
        or spec.banned_ids
        or params.has_penalties
        or params.allowed_ids
        or params.bad_words
        or params.watermark is not None
    )


def reshape(row: Tensor, spec: SampleSpec) -> None:
    """Penalties, bias and bans on one row, in place."""
    params = spec.params
    if params.repetition_penalty != 1.0:  # over prompt and output, as its authors define it
        known = [token for token in set(spec.history) if token < len(row)]  # those of images are in no vocabulary
        seen = torch.tensor(known, dtype=torch.int64, device=row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:  # over the output alone, as OpenAI defines them
        counts = Counter(spec.history[spec.prompt_len :])
        ids = torch.tensor(list(counts), dtype=torch.int64, device=row.device)
        times = torch.tensor(list(counts.values()), dtype=row.dtype, device=row.device)
        row[ids] -= params.presence_penalty + params.frequency_penalty * times
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=row.device)
        row[ids] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=row.device)
    if banned := [*spec.banned_ids, *params.words_ending(spec.history[spec.prompt_len :])]:
        row[banned] = -torch.inf
    if params.allowed_ids:
        allowed = torch.tensor(params.allowed_ids, device=row.device)
        values = row[allowed]
        row.fill_(-torch.inf)
        row[allowed] = values


def _draw(logits: Tensor, specs: list[SampleSpec]) -> list[int]:
    temperatures = torch.tensor([[s.params.temperature] for s in specs], dtype=torch.float32, device=logits.device)
    logits = logits / temperatures
    uniforms = [keyed_uniform(s.params.seed, s.position) for s in specs]
    whole = [i for i, s in enumerate(specs) if not truncates(s.params)]
    chosen = [0] * len(specs)
    if whole:
        mass = logits[whole].softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
        for i, token_id in zip(whole, _invert(mass, [uniforms[i] for i in whole]), strict=True):
            chosen[i] = token_id
    for i, spec in enumerate(specs):
        if truncates(spec.params):
            chosen[i] = _draw_truncated(logits[i], spec.params, uniforms[i])
    return chosen


def _draw_truncated(row: Tensor, params: SamplingParams, uniform: float) -> int:
    ids, probabilities = nucleus(row, params)
    mass = probabilities.cumsum(dim=-1, dtype=torch.float64)
    return int(ids[_invert(mass[None], [uniform])[0]])


def _invert(mass: Tensor, uniforms: list[float]) -> list[int]:
    """The first index whose cumulative mass exceeds u of the total, per row."""
    points = torch.tensor(uniforms, dtype=torch.float64, device=mass.device)[:, None] * mass[:, -1:]
    found: list[int] = torch.searchsorted(mass, points, right=True).squeeze(1).clamp(max=mass.shape[1] - 1).tolist()
    return found


def _logprobs(row: Tensor, token_id: int, count: int | None) -> list[TokenLogprobs] | None:
    if count is None:
        return None
    total = row.logsumexp(dim=-1)
    top: list[tuple[int, float]] = []
    if count:
        values, ids = row.topk(count)
        top = list(zip(ids.tolist(), (values - total).tolist(), strict=True))
    return [TokenLogprobs(float(row[token_id] - total), top)]
