from penstock.tenancy.prices import FREE, NANOS, Price


def test_tokens_cost_what_the_price_says_to_the_nano() -> None:
    price = Price(input=0.15, output=0.6)
    assert price.nanos(1_000_000, 0, 1_000_000) == 750_000_000  # 0.15 + 0.60
    assert price.nanos(1, 0, 1) == 750
    assert FREE.nanos(1_000_000, 0, 1_000_000) == 0


def test_cached_input_may_be_cheaper() -> None:
    assert Price(1000.0, 0.0, cached=100.0).nanos(1000, 500, 0) == 0.55 * NANOS
    assert Price(1000.0, 0.0).nanos(1000, 500, 0) == NANOS


def test_a_provider_that_counts_more_cached_tokens_than_tokens_pays_nobody_back() -> None:
    assert Price(1000.0, 0.0, cached=0.0).nanos(10, 500, 0) == 0


def test_device_time_is_paid_by_the_replicas_hour_beside_tokens_or_alone() -> None:
    assert Price(replica_hour=3.6).nanos(10**6, 0, 10**6, device_s=2.0) == 2_000_000
    assert Price(input=1.0, replica_hour=3.6).nanos(1000, 0, 0, device_s=2.0) == 1_000_000 + 2_000_000
    assert Price(input=1.0).nanos(1000, 0, 0, device_s=2.0) == 1_000_000


def test_no_request_costs_more_than_a_store_can_hold() -> None:
    dear = Price(1e9, 1e9, replica_hour=1e9)
    assert dear.nanos(2**40, 0, 2**40, device_s=1e12) == 10**18 < 2**63
