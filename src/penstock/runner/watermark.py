"""Watermarks in rows of logits, after all else that changes them: see `core.watermark` for what they are.

Green: the row's green tokens gain. Gumbel: the row's token is chosen here, by keyed numbers in place of chance, and
left as the only one possible, so whatever chooses later chooses it. The first tokens of an answer, which have no whole
context of its own before them, are never marked: a detector that does not know the prompt could not see it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from penstock.core.watermark import Scheme, Watermark, fraction_bits, fractions, mix, steps
from penstock.runner.nucleus import nucleus, truncates
from penstock.sched.plan import SampleSpec


def apply_watermarks(logits: Tensor, specs: list[SampleSpec]) -> None:
    """Marks rows in place; `logits` is float32."""
    green: dict[int, list[tuple[int, Watermark, list[int]]]] = {}  # by number of seeds, or by row
    for row, spec in enumerate(specs):
        if (watermark := spec.params.watermark) is None:
            continue
        if watermark.scheme is Scheme.GUMBEL:
            _choose(logits[row], spec, watermark)
        elif len(spec.history) - spec.prompt_len >= watermark.width:
            seeds = watermark.seeds(spec.history[-watermark.width :])
            # On a CPU the bits of one row stay in its cache, and those of many do not.
            group = -1 - row if logits.device.type == "cpu" else len(seeds)
            green.setdefault(group, []).append((row, watermark, seeds))
    for marked in green.values():
        _prefer_green(logits, marked)


def _prefer_green(logits: Tensor, marked: list[tuple[int, Watermark, list[int]]]) -> None:
    device = logits.device
    seeds = torch.tensor([seeds for _, _, seeds in marked], device=device)  # [rows, seeds]
    places = _steps(logits)
    bits, *others = (mix(places + column) for column in seeds.T[:, :, None])  # [rows, vocabulary] each
    if others:  # the least of several counts; mixed once more, because that is not uniform
        bits = mix(reduce(torch.minimum, others, bits))
    below = torch.tensor([watermark.green_below for _, watermark, _ in marked], device=device)[:, None]
    gains = torch.tensor([watermark.delta for _, watermark, _ in marked], device=device)[:, None]
    rows = torch.tensor([row for row, _, _ in marked], device=device)
    logits[rows] += gains * (fraction_bits(bits) < below)


def _choose(row: Tensor, spec: SampleSpec, watermark: Watermark) -> None:
    """The largest of probability / exponential, whose exponentials are keyed: drawn exactly by the probabilities. Where
    the context has been before, it is left to chance: the same numbers again would send the text round in circles."""
    params = spec.params
    context = fresh_context(spec.history[spec.prompt_len :], watermark.width)
    if params.is_greedy or context is None:
        return
    scaled = row / params.temperature
    if truncates(params):
        ids, probabilities = nucleus(scaled, params)
        places = steps(ids)
    else:
        ids, probabilities, places = None, scaled.softmax(dim=-1), _steps(row)
    bits = fraction_bits(mix(places + watermark.seed(context)))
    best = (probabilities / -fractions(bits).log()).argmax()
    token_id = best if ids is None else ids[best]
    row.fill_(-torch.inf)
    row[token_id] = 0.0


def _steps(logits: Tensor) -> Tensor:
    places: Tensor = steps(torch.arange(logits.shape[-1], device=logits.device))
    return places


def fresh_context(output_ids: Sequence[int], width: int) -> Sequence[int] | None:
    """The last `width` tokens of an answer; None: there are not so many yet, or they have been there before in it, and
    the numbers that follow from them are used up."""
    if len(output_ids) < width:
        return None
    context = output_ids[-width:]
    words = array("I", output_ids).tobytes()
    end = words[-4 * width :]
    found = words.find(end)
    while found % 4:  # the end of one token and the beginning of the next
        found = words.find(end, found + 1)
    return context if found == len(words) - len(end) else None
