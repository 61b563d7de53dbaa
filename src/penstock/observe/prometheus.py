"""The catalog as a Prometheus registry. One per process, made by whoever composes it; no global registry."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from penstock.observe.catalog import CATALOG, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Values of the catalog's metrics, addressed by their catalog entries."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series per counter, which nobody reads
        self._registry = CollectorRegistry(auto_describe=False)
        self._families: dict[str, Counter | Gauge | Histogram] = {}
        self._totals: dict[str, float] = {}
        for metric in CATALOG:
            self._families[metric.name] = self._make(metric)

    def inc(self, metric: Metric, *labels: str, by: float = 1.0) -> None:
        family = self._families[metric.name]
        assert isinstance(family, Counter)
        (family.labels(*labels) if labels else family).inc(by)

    def set_total(self, metric: Metric, total: float) -> None:
        """Bring a counter up to a total that is kept elsewhere; a total that fell has started again from zero."""
        last = self._totals.get(metric.name, 0.0)
        self._totals[metric.name] = total
        self.inc(metric, by=total - last if total >= last else total)

    def set(self, metric: Metric, value: float) -> None:
        family = self._families[metric.name]
        assert isinstance(family, Gauge)
        family.set(value)

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        family = self._families[metric.name]
        assert isinstance(family, Histogram)
        (family.labels(*labels) if labels else family).observe(value)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def _make(self, metric: Metric) -> Counter | Gauge | Histogram:
        match metric.kind:
            case "counter":
                return Counter(metric.name, metric.help, metric.labels, registry=self._registry)
            case "gauge":
                return Gauge(metric.name, metric.help, metric.labels, registry=self._registry)
            case "histogram":
                return Histogram(
                    metric.name, metric.help, metric.labels, registry=self._registry, buckets=metric.buckets
                )
