"""Choosing tokens on a GPU: as `sampler` does, but nothing is read back.

Every row is treated by row-wise operations alone, so its token does not depend on its neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.core.sampling import keyed_uniform
from penstock.runner.masks import apply_masks
from penstock.runner.nucleus import truncates
from penstock.runner.sampler import reshape, reshapes
from penstock.runner.watermark import apply_watermarks
from penstock.sched.plan import SampleSpec


def choose(logits: Tensor, best: Tensor, specs: list[SampleSpec]) -> Tensor:
    """One token id per row of `logits`, int32; `best` is their greedy choice."""
    if all(spec.params.is_greedy and not reshapes(spec) for spec in specs):
        return best
    logits = logits.float()
    if any(reshapes(spec) for spec in specs):
        logits = logits.clone()
        for row, spec in zip(logits, specs, strict=True):
            reshape(row, spec)
        apply_masks(logits, specs)
        apply_watermarks(logits, specs)  # on the host's word for a row's context; see `Sequence.must_wait`
        best = logits.argmax(dim=-1)
        if all(spec.params.is_greedy for spec in specs):
            return best.int()
    device = logits.device
    params = [spec.params for spec in specs]
    temperature = _column([p.temperature or 1.0 for p in params], device)
    uniform = _column([keyed_uniform(s.params.seed, s.position) for s in specs], device, torch.float64)
    scaled = logits / temperature
    drawn = _invert(scaled.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64), uniform)
    if any(truncates(p) for p in params):
        truncated = _draw_truncated(scaled, specs, uniform)
        drawn = torch.where(_mask([truncates(p) for p in params], device), truncated, drawn)
    return torch.where(_mask([p.is_greedy for p in params], device), best, drawn).int()


def _draw_truncated(scaled: Tensor, specs: list[SampleSpec], uniform: Tensor) -> Tensor:
    """Top-k, then top-p, then min-p."""
    device, vocab_size = scaled.device, scaled.shape[1]
    params = [spec.params for spec in specs]
    values, ids = scaled.sort(dim=-1, descending=True)
    ranks = torch.arange(vocab_size, device=device)
    beyond = ranks >= _column([p.top_k or vocab_size for p in params], device, torch.int64)
    probabilities = values.masked_fill(beyond, -torch.inf).softmax(dim=-1)
    before = probabilities.cumsum(dim=-1, dtype=torch.float64) - probabilities
    keep = before < _column([p.top_p for p in params], device, torch.float64)
    keep &= probabilities >= _column([p.min_p for p in params], device) * probabilities[:, :1]
    mass = (probabilities * keep).cumsum(dim=-1, dtype=torch.float64)
    return ids.gather(1, _invert(mass, uniform)[:, None]).squeeze(1)


def logprobs(row: Tensor, token_id: Tensor, count: int) -> Tensor:
    """[(id, log probability)] of the chosen token and then of the `count` best, float64, on the device."""
    row = row.float()
    total = row.logsumexp(dim=-1)
    values, ids = row.topk(count)
    own = row[token_id.long()]
    ids = torch.cat((token_id[None].double(), ids.double()))
    return torch.stack((ids, (torch.cat((own[None], values)) - total).double()), dim=1)


def _invert(mass: Tensor, uniform: Tensor) -> Tensor:
    """The first index whose cumulative mass exceeds u of the total, per row."""
    found = torch.searchsorted(mass, uniform * mass[:, -1:], right=True).squeeze(1)
    return found.clamp(max=mass.shape[1] - 1)


def _column(values: list[float] | list[int], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)[:, None]


def _mask(values: list[bool], device: torch.device) -> Tensor:
    return torch.tensor(values).pin_memory().to(device, non_blocking=True)
