from penstock.tenancy.prices import NANOS, Price, PriceList


def test_tokens_cost_what_the_list_says_to_the_nano() -> None:
    price = Price(input_per_1k=0.00015, output_per_1k=0.0006)
    assert price.nanos(1_000_000, 0, 1_000_000) == 750_000_000  # 0.15 + 0.60
    assert price.nanos(1, 0, 1) == 750


def test_cached_input_may_be_cheaper() -> None:
    assert Price(1.0, 0.0, cached_per_1k=0.1).nanos(1000, 500, 0) == 0.55 * NANOS
    assert Price(1.0, 0.0).nanos(1000, 500, 0) == NANOS


def test_the_first_pattern_that_fits_counts_and_the_rest_is_free() -> None:
    prices = PriceList({"llama-70b": Price(2.0), "llama-*": Price(1.0)})
    assert [prices.of(name).input_per_1k for name in ("llama-70b", "llama-8b", "smollm2")] == [2.0, 1.0, 0.0]
