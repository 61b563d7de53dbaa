"""The limiter of one process: many tenants, a clock, and no memory of those that are idle."""

from penstock.tenancy.limits.limiter import SWEEP_EVERY, Limiter, LocalLimiter
from penstock.tenancy.limits.quota import Quota, Rate, Reason, Refusal
from penstock.tenancy.limits.tenant_limits import Reservation


class Watch:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_tenants_do_not_share_their_limits() -> None:
    limiter: Limiter = LocalLimiter(Watch())
    quota = Quota(tokens=Rate(60))
    assert isinstance(limiter.reserve("acme", quota, 60), Reservation)
    assert isinstance(limiter.reserve("acme", quota, 10), Refusal)
    assert isinstance(limiter.reserve("zeta", quota, 60), Reservation)


def test_a_new_quota_applies_to_the_next_request() -> None:
    limiter = LocalLimiter(Watch())
    assert isinstance(limiter.reserve("acme", Quota(concurrency=1), 1), Reservation)
    assert isinstance(limiter.reserve("acme", Quota(concurrency=2), 1), Reservation)
    refused = limiter.reserve("acme", Quota(concurrency=2), 1)
    assert isinstance(refused, Refusal)
    assert refused.reason is Reason.CONCURRENCY


def test_a_limiter_goes_on_where_another_one_ended() -> None:
    watch, quota = Watch(), Quota(tokens=Rate(60))
    before = LocalLimiter(watch)
    held = before.reserve("acme", quota, 50)
    assert isinstance(held, Reservation)
    slots = {tenant: [slot] for tenant, slot in before.slots()}
    after = LocalLimiter(watch, slots=slots)
    assert isinstance(after.reserve("acme", quota, 11, caller=1), Refusal)
    after.settle(after.restore("acme", quota, 50), 20)
    assert isinstance(after.reserve("acme", quota, 11, caller=1), Refusal)
    watch.now += 60
    assert isinstance(after.reserve("acme", quota, 60, caller=1), Reservation)


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
