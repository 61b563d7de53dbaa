from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from penstock.observe.catalog import Metric
from penstock.observe.gateway_catalog import GATEWAY_CATALOG
from penstock.observe.registry import Registry

COUNTER = Metric("penstock_things_total", "counter", "Things.", ("kind",))
GAUGE = Metric("penstock_level", "gauge", "A level.", ("where",))
HISTOGRAM = Metric("penstock_wait_seconds", "histogram", "Waits.", ("kind",), (0.1, 1.0))


def samples(registry: Registry) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(registry.exposition().decode())
    return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}


def test_every_metric_of_the_gateway_is_exported_under_its_name() -> None:
    exported = {f.name for f in text_string_to_metric_families(Registry(GATEWAY_CATALOG).exposition().decode())}
    assert exported == {metric.name.removesuffix("_total") for metric in GATEWAY_CATALOG}
    assert all(metric.name.startswith("penstock_gateway_") for metric in GATEWAY_CATALOG)


def test_counts_and_gauges_are_what_was_last_said() -> None:
    registry = Registry((COUNTER, GAUGE))
    for _ in range(2):
        registry.count(COUNTER, "a").value += 2
    registry.replace(GAUGE, {("here",): 1, ("there",): 2})
    registry.replace(GAUGE, {("there",): 3})
    assert samples(registry) == {("penstock_things_total", "a"): 4, ("penstock_level", "there"): 3}


@given(st.lists(st.sampled_from([0.05, 0.1, 0.5, 1.0, 3.0])))
def test_a_histogram_counts_what_is_at_most_each_bound(values: list[float]) -> None:
    registry = Registry((HISTOGRAM,))
    spread = registry.spread(HISTOGRAM, "a")
    for value in values:
        spread.observe(value)
    found = samples(registry)
    for bound in ("0.1", "1.0", "+Inf"):
        at_most = sum(value <= float(bound) for value in values)
        assert found["penstock_wait_seconds_bucket", "a", bound] == at_most
    assert found["penstock_wait_seconds_count", "a"] == len(values)
    assert abs(found["penstock_wait_seconds_sum", "a"] - sum(values)) < 1e-9


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029")))
def test_a_label_comes_back_as_it_was(value: str) -> None:
    registry = Registry((COUNTER,))
    registry.count(COUNTER, value).value = 1
    assert list(samples(registry)) == [("penstock_things_total", value)]
