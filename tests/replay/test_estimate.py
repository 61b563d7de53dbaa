import random

import numpy as np
import pytest

from penstock.replay.estimate import Fit, Times, judge, spread
from penstock.replay.policy import Parts


def drawn(count: int, seed: int = 1) -> tuple[Times, np.ndarray]:
    rng, times = random.Random(seed), Times()
    for _ in range(count):
        times.append(Parts(rng.expovariate(2.0), rng.expovariate(1.0)))
    return times, np.zeros(count)


def test_an_estimate_that_is_off_by_factors_is_put_right() -> None:
    times, waited = drawn(200)
    measured = 0.05 + 0.5 * times.queue_s + 2.0 * times.prefill_s
    found = judge(times, waited, measured)
    assert found.fit is not None
    assert (found.fit.fixed_s, found.fit.queue, found.fit.prefill) == pytest.approx((0.05, 0.5, 2.0))
    assert found.fitted is not None
    assert found.fitted.explained == pytest.approx(1.0)
    assert found.router is not None
    assert found.router.explained < 0.7
    assert found.router.mean_error_s > 0.2 > 1e-6 > found.fitted.mean_error_s


def test_the_fit_is_judged_by_requests_it_has_not_seen() -> None:
    """With as many numbers as requests a fit to noise would look good."""
    times, waited = drawn(40)
    noise = np.array([random.Random(seed).expovariate(1.0) for seed in range(40)])
    found = judge(times, waited, noise)
    assert found.fitted is not None
    assert found.fitted.explained < 0.1
    assert found.mean_alone_error_s <= found.fitted.mean_error_s * 1.1


def test_longer_never_means_sooner() -> None:
    times, waited = drawn(100)
    found = judge(times, waited, 3.0 + 0.5 * times.queue_s - 0.1 * times.prefill_s)
    assert found.fit is not None
    assert found.fit.prefill == 0.0
    assert found.fit.queue == pytest.approx(0.5, abs=0.1)


def test_means_come_out_right_where_long_prompts_take_longer_for_each_token() -> None:
    times, waited = drawn(200)
    measured = times.queue_s + times.prefill_s**2
    found = judge(times, waited, measured)
    assert found.fit is not None
    assert found.fit.fixed_s == 0.0  # it would be negative
    assert found.fit.seconds(times).mean() == pytest.approx(measured.mean())


def test_the_wait_at_the_door_is_nobodys_estimate() -> None:
    times, _ = drawn(60)
    waited = np.array([random.Random(seed).random() for seed in range(60)])
    found = judge(times, waited, waited + times.queue_s + times.prefill_s)
    assert found.router is not None
    assert found.router.mean_error_s == pytest.approx(0.0)
    assert found.fit == Fit(*(pytest.approx(value, abs=1e-9) for value in (0.0, 1.0, 1.0)))


def test_what_nobody_measured_is_left_out() -> None:
    times, waited = drawn(100)
    measured = times.queue_s + times.prefill_s
    measured[10:] = np.nan
    few = judge(times, waited, measured)
    assert (few.num_measured, few.fit) == (10, None)
    assert few.router is not None
    assert few.measured == spread(measured[:10])
    assert judge(times, waited, np.full(100, np.nan)).measured is None
