"""Metrics for one thread that counts a lot: a count is an attribute, and all the work is left to whoever reads.

The children that `count` and `spread` return are to be kept by the caller: adding to one costs some 50 ns, where the
client library's, which may be used from many threads, cost one to two microseconds. The text may be made by another
thread meanwhile; its numbers are then as old as its beginning or a little newer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping

from penstock.observe.catalog import Metric

Labels = tuple[str, ...]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Counter:
    __slots__ = ("value",)

    def __init__(self, value: float = 0) -> None:
        self.value = value


class Histogram:
    """A histogram."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last: more than any bound
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class Registry:
    """All series of a process, by the catalog's entries and their labels' values."""

    def __init__(self, catalog: Iterable[Metric]) -> None:
        self._counts: dict[Metric, dict[Labels, Counter]] = {}
        self._spreads: dict[Metric, dict[Labels, Histogram]] = {}
        self._catalog = tuple(catalog)
        for metric in self._catalog:
            if metric.kind == "histogram":
                self._spreads[metric] = {}
            else:
                self._counts[metric] = {} if metric.labels else {(): Counter()}

    def count(self, metric: Metric, *labels: str) -> Counter:
        assert len(labels) == len(metric.labels)
        return self._counts[metric].setdefault(labels, Counter())

    def spread(self, metric: Metric, *labels: str) -> Histogram:
        assert len(labels) == len(metric.labels)
        return self._spreads[metric].setdefault(labels, Histogram(metric.buckets))

    def replace(self, metric: Metric, values: Mapping[Labels, float]) -> None:
        """All of a gauge's series, anew: what is not named is gone."""
        self._counts[metric] = {labels: Counter(value) for labels, value in values.items()}

    def series(self) -> Iterator[tuple[Metric, list[tuple[Labels, float | Histogram]]]]:
        """All there is, by metric; a histogram is the living one."""
        for metric in self._catalog:
            if metric.kind == "histogram":
                yield metric, list(self._spreads[metric].items())
            else:
                yield metric, [(labels, count.value) for labels, count in list(self._counts[metric].items())]

    def exposition(self) -> bytes:
        """Returns the metrics in Prometheus' text format."""
        lines: list[str] = []
        for metric in self._catalog:
            lines += (f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}")
            if metric.kind == "histogram":
                for labels, spread in list(self._spreads[metric].items()):
                    lines += _spread_lines(metric, labels, spread)
            else:
                for labels, count in list(self._counts[metric].items()):
                    lines.append(f"{metric.name}{_braces(_pairs(metric, labels))} {count.value}")
        return "\n".join([*lines, ""]).encode()


def _spread_lines(metric: Metric, labels: Labels, spread: Histogram) -> list[str]:
    counts, total = list(spread.counts), spread.total
    pairs, lines, so_far = _pairs(metric, labels), [], 0
    for bound, count in zip((*metric.buckets, "+Inf"), counts, strict=True):
        so_far += count
        lines.append(f"{metric.name}_bucket{_braces([*pairs, _pair('le', str(bound))])} {so_far}")
    return [*lines, f"{metric.name}_sum{_braces(pairs)} {total}", f"{metric.name}_count{_braces(pairs)} {so_far}"]


def _pairs(metric: Metric, labels: Labels) -> list[str]:
    return [_pair(name, value) for name, value in zip(metric.labels, labels, strict=True)]


def _pair(name: str, value: str) -> str:
    escaped = value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return f'{name}="{escaped}"'


def _braces(pairs: list[str]) -> str:
    return f"{{{','.join(pairs)}}}" if pairs else ""
