from prometheus_client.parser import text_string_to_metric_families

from penstock.observe import catalog
from penstock.observe.prometheus import Metrics


def test_every_metric_of_the_catalog_is_exported_under_its_name() -> None:
    exported = {family.name for family in text_string_to_metric_families(Metrics().exposition().decode())}
    assert {metric.name.removesuffix("_total") for metric in catalog.CATALOG} <= exported
    assert all(metric.name.startswith("penstock_") for metric in catalog.CATALOG)


def test_a_total_kept_elsewhere_may_start_again_from_zero() -> None:
    metrics = Metrics()
    for total in (5, 9, 2):  # an engine that was restarted counts from zero
        metrics.set_total(catalog.STEPS, total)
    assert "penstock_steps_total 11.0" in metrics.exposition().decode()
