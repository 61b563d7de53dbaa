"""Demand of a pool, second by second: how many requests arrive, and how long they are on average.

A file has windows of some minutes with a mean rate and a dispersion (variance of the counts over their mean). Inside a
window the number of requests is the file's; how they lie in it is drawn, so that counts have that dispersion:
shares of a Dirichlet distribution, then a multinomial draw. Without dispersion that is Poisson's.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError
from penstock.core.files import naming
from penstock.tenancy.fleet import FleetSample

Counts = NDArray[np.int64]
Numbers = NDArray[np.float64]

DAY_S = 86400
MINUTE_S = 60
_COLUMNS = ("start_s", "requests_per_s", "dispersion", "input_mean", "output_mean")


class Window(NamedTuple):
    """Mean demand over some seconds."""

    seconds: int
    rate: float
    dispersion: float
    prompt_tokens: float
    output_tokens: float


@dataclass(frozen=True)
class DemandCurve:
    """Arrays of one number per second. `begins_at`: seconds since 1970 of the first, for the time of week."""

    name: str
    arrivals: Counts
    prompt_tokens: Numbers
    output_tokens: Numbers
    begins_at: float = 4 * DAY_S  # a Monday
    surge_at: int | None = None  # the second in which a surge begins, if that is what the curve is about

    @property
    def seconds(self) -> int:
        return len(self.arrivals)

    def first(self, seconds: int) -> DemandCurve:
        return replace(
            self,
            arrivals=self.arrivals[:seconds],
            prompt_tokens=self.prompt_tokens[:seconds],
            output_tokens=self.output_tokens[:seconds],
        )


def draw(
    name: str, windows: Sequence[Window], seed: int, *, burst_s: int = 1, begins_at: float = 4 * DAY_S
) -> DemandCurve:
    """`burst_s`: counts over so many seconds have the dispersion; inside them arrivals are Poisson's."""
    random = np.random.default_rng(seed)
    arrivals = [_draw_window(random, window, burst_s) for window in windows]
    seconds = [window.seconds for window in windows]
    return DemandCurve(
        name,
        np.concatenate(arrivals),
        np.repeat([max(1.0, window.prompt_tokens) for window in windows], seconds),
        np.repeat([max(1.0, window.output_tokens) for window in windows], seconds),
        begins_at,
    )


def _draw_window(random: np.random.Generator, window: Window, burst_s: int) -> Counts:
    seconds = window.seconds
    requests = int(random.poisson(window.rate * seconds)) if window.dispersion <= 0 else round(window.rate * seconds)
    num_bursts = max(1, seconds // burst_s)
    # Variance of a Dirichlet-multinomial count over its mean: (1 - 1/bursts) (requests + a) / (1 + a).
    wanted = window.dispersion / max(1e-9, 1 - 1 / num_bursts)
    if wanted <= 1.0 or requests < 2:
        return random.multinomial(requests, np.full(seconds, 1 / seconds))
    concentration = max(1e-3, (requests - wanted) / (wanted - 1))
    bursts = random.multinomial(requests, random.dirichlet(np.full(num_bursts, concentration / num_bursts)))
    if num_bursts == seconds:
        return bursts
    lengths = np.full(num_bursts, seconds // num_bursts)
    lengths[-1] += seconds - lengths.sum()
    parts = [random.multinomial(n, np.full(k, 1 / k)) for n, k in zip(bursts, lengths, strict=True)]
    return np.concatenate(parts)


def read_demand(path: Path, seed: int, *, peak: float | None = None, burst_s: int = 1) -> DemandCurve:
    """A CSV with the columns start_s, requests_per_s, dispersion, input_mean and output_mean. `peak`: requests/s of the
    busiest window, by which all are scaled."""
    with naming(path), path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    try:
        values = [tuple(float(row[name]) for name in _COLUMNS) for row in rows]
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{path}: a demand has rows of {', '.join(_COLUMNS)}", param="demand") from None
    if len(values) < 2:
        raise ConfigError(f"{path}: a demand has two windows at least", param="demand")
    lengths = [round(after[0] - before[0]) for before, after in pairwise(values)]
    if min(lengths) < 1:
        raise ConfigError(f"{path}: windows follow each other by a second at least", param="demand")
    windows = [Window(seconds, *row[1:]) for seconds, row in zip([*lengths, lengths[-1]], values, strict=True)]
    return draw(path.stem, scaled(windows, peak), seed, burst_s=burst_s)


def scaled(windows: Sequence[Window], peak: float | None) -> list[Window]:
    """A smaller service of the same kind: its dispersion above Poisson's shrinks with the rate."""
    busiest = max(window.rate for window in windows)
    factor = peak / busiest if peak is not None and busiest else 1.0
    if factor == 1.0:
        return list(windows)
    return [
        window._replace(rate=window.rate * factor, dispersion=1 + (window.dispersion - 1) * factor)
        if window.dispersion > 1
        else window._replace(rate=window.rate * factor)
        for window in windows
    ]


def from_history(samples: Iterable[FleetSample], seed: int, *, dispersion: float = 0.0) -> DemandCurve:
    """Demand of one pool that a fleet recorded, minute by minute; a gap is a time without requests. Prompt tokens that
    were found in caches are left out: nobody computed them."""
    found = sorted(samples, key=lambda sample: sample.at)
    if len(found) < 2:
        raise ConfigError("a history of two minutes at least is needed", param="pool")
    known = [(each.prompt_tokens * (1 - each.cached_share), each.output_tokens) for each in found if each.prompt_tokens]
    lengths = known[0] if known else (1.0, 1.0)  # of the last requests that ended
    windows: list[Window] = []
    for before, sample in pairwise(found):
        if (passed_s := round(sample.at - before.at)) < 1:
            continue
        if sample.prompt_tokens:
            lengths = sample.prompt_tokens * (1 - sample.cached_share), sample.output_tokens
        if passed_s > 2 * MINUTE_S:
            windows.append(Window(passed_s - MINUTE_S, 0.0, 0.0, *lengths))
            passed_s = MINUTE_S
        rate = sample.arrivals_per_s if sample.arrivals is None else sample.arrivals / passed_s
        windows.append(Window(passed_s, rate, dispersion, *lengths))
    return draw(found[0].pool, windows, seed, begins_at=found[0].at)
