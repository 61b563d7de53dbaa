"""A controller's view of a curve's demand: arrivals of the last seconds, their noise, and the
mean request."""

from __future__ import annotations

import numpy as np

from penstock.sim.fleet.demand import DemandCurve, Numbers

SMOOTHED_S = 15
PEAK_S = 5
MIX_S = 15  # a busy service's last 2,000 requests
NOISE_S = 60


class Signals:
    """Lists of one number per second: as known at its end."""

    def __init__(self, curve: DemandCurve) -> None:
        arrivals = curve.arrivals.astype(np.float64)
        self.arrivals = arrivals.tolist()
        self.rate = _mean(arrivals, SMOOTHED_S).tolist()
        padded = np.concatenate([np.zeros(PEAK_S - 1), arrivals])
        self.peak = np.lib.stride_tricks.sliding_window_view(padded, PEAK_S).max(axis=1).tolist()
        self.dispersion = _dispersion(arrivals, NOISE_S).tolist()
        requests = _mean(arrivals, MIX_S)
        self.prompt_tokens, self.output_tokens = (
            np.divide(
                _mean(tokens * arrivals, MIX_S), requests, out=tokens.astype(np.float64), where=requests > 1e-9
            ).tolist()
            for tokens in (curve.prompt_tokens, curve.output_tokens)
        )


def _mean(values: Numbers, seconds: int) -> Numbers:
    total = np.concatenate([[0.0], np.cumsum(values)])
    begins = np.maximum(0, np.arange(1, len(total)) - seconds)
    means: Numbers = (total[1:] - total[begins]) / (np.arange(1, len(total)) - begins)
    return means


def _dispersion(arrivals: Numbers, seconds: int) -> Numbers:
    """The same number as the controller's meter has: the busiest second of the last ones is left out."""
    found: Numbers = np.ones(len(arrivals))
    if len(arrivals) < seconds:
        return found
    windows = np.lib.stride_tricks.sliding_window_view(arrivals, seconds)
    busiest = windows.max(axis=1)
    total, squares = (_mean(values, seconds)[seconds - 1 :] * seconds for values in (arrivals, arrivals**2))
    mean = (total - busiest) / (seconds - 1)
    variance = (squares - busiest**2 - (seconds - 1) * mean**2) / (seconds - 2)
    found[seconds - 1 :] = np.divide(variance, mean, out=np.ones_like(mean), where=mean > 1e-9)
    return found
