"""The limiter of one process: many tenants, a clock, and no memory of those that are idle."""

from penstock.tenancy.limits.account import Reservation
from penstock.tenancy.limits.limiter import SWEEP_EVERY, Limiter, LocalLimiter
from penstock.tenancy.limits.quota import Quota, Rate, Reason, Refusal


class Watch:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_tenants_do_not_share_their_limits() -> None:
    limiter: Limiter = LocalLimiter(Watch())
    quota = Quota(tokens=Rate(60))
    assert isinstance(limiter.reserve("acme", quota, 10), Reservation)
    assert isinstance(limiter.reserve("acme", quota, 10), Refusal)
    assert isinstance(limiter.reserve("zeta", quota, 10), Reservation)


def test_a_new_quota_applies_to_the_next_request() -> None:
    limiter = LocalLimiter(Watch())
    assert isinstance(limiter.reserve("acme", Quota(concurrency=1), 1), Reservation)
    assert isinstance(limiter.reserve("acme", Quota(concurrency=2), 1), Reservation)
    refused = limiter.reserve("acme", Quota(concurrency=2), 1)
    assert isinstance(refused, Refusal)
    assert refused.reason is Reason.CONCURRENCY


def test_a_limiter_that_does_not_know_the_past_starts_with_what_flowed_in_since() -> None:
    watch = Watch()
    limiter = LocalLimiter(watch, known_since=watch.now)
    quota = Quota(tokens=Rate(60))
    assert isinstance(limiter.reserve("acme", quota, 1), Refusal)
    watch.now += 4
    assert isinstance(limiter.reserve("zeta", quota, 5), Refusal)
    assert isinstance(limiter.reserve("beta", quota, 4), Reservation)


def test_idle_tenants_are_forgotten_and_busy_ones_are_not() -> None:
    watch = Watch()
    limiter = LocalLimiter(watch)
    quota = Quota(tokens=Rate(60), concurrency=1)
    limiter.reserve("busy", quota, 1)
    for n in range(3 * SWEEP_EVERY):
        watch.now += 1
        held = limiter.reserve(f"tenant-{n}", quota, 1)
        assert isinstance(held, Reservation)
        limiter.settle(held, 1)
    assert limiter.in_use("busy") == 1
    assert len(limiter._accounts) <= SWEEP_EVERY + 1
