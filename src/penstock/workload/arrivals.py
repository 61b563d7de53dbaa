"""Arrival times of requests that do not wait for one another. Randomness is passed in; time is a number."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Literal

Process = Literal["poisson", "gamma", "constant"]


def arrival_times(process: Process, rate: float, source: Random, *, burstiness: float = 1.0) -> Iterator[float]:
    """Seconds, from 0 on and without end, `rate` a second on the average.

    `gamma`: intervals of that distribution. `burstiness` is its shape: 1 is poisson, less comes in bursts, more is
    more even.
    """
    at_s = 0.0
    while True:
        yield at_s
        match process:
            case "poisson":
                at_s += source.expovariate(rate)
            case "gamma":
                at_s += source.gammavariate(burstiness, 1 / (rate * burstiness))
            case "constant":
                at_s += 1 / rate
