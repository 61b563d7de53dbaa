"""Strata of a rollout's times: which requests may be compared, whichever version answered them.

A version that has just begun has idle replicas and cold caches, and other requests than the one that serves everybody.
So times are compared among requests that were alike in what moves them: prompt tokens that no cache had, requests in
flight at the replica meanwhile, and the length of the answer. All are counted in powers of two.
"""

from __future__ import annotations

from penstock.core.rollout import Metric

_MAX_BUCKET = 20  # a million and more are alike


def bucket(count: int) -> int:
    """0 for none, 1 for one, 2 for two and three, 3 for four to seven, and so on."""
    return min(max(count, 0).bit_length(), _MAX_BUCKET)


def stratum(metric: Metric, *, uncached_tokens: int, in_flight: int, output_tokens: int) -> str:
    """Empty: all requests may be compared.

    `in_flight`: other requests at the replica, in the mean from its sending to its end.
    """
    match metric:
        case Metric.TTFT:
            return f"p{bucket(uncached_tokens)}f{bucket(in_flight)}"
        case Metric.TPOT:
            return f"f{bucket(in_flight)}"
        case Metric.LATENCY:
            return f"f{bucket(in_flight)}o{bucket(output_tokens)}"
        case Metric.DEVICE_TIME | Metric.COST:  # a prompt's tokens take less of a device than an answer's
            return f"p{bucket(uncached_tokens)}f{bucket(in_flight)}o{bucket(output_tokens)}"
        case _:
            return ""
