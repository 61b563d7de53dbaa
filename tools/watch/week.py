"""A synthetic week of a fleet, minute by minute, made from a seed: days and nights, a weekend, noise, planted faults.

The week before it is the same without faults: who compares with the past must have one. Rates may be those of a trace
instead, over and over; then there is no week to learn, and only false alarms are counted.

    python -m tools.watch.week [--seeds 5] [--trace FILE ...]     counts detections and false alarms
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import cos, exp, pi, sqrt
from pathlib import Path
from typing import NamedTuple

import numpy as np

from penstock.watch.deviations import Deviations
from penstock.watch.samples import Sample, Signal
from penstock.watch.siblings import Siblings
from penstock.workload.trace import read_trace

MINUTES = 7 * 24 * 60
REPLICAS = 4
_BEGAN = 1_762_732_800.0  # a Monday, 00:00 UTC
_BLIPS = 0.002  # of minutes: a replica that is slow for one has no fault
_AFTER = 30  # minutes within which what a fault did to the signals may still be told


@dataclass(frozen=True)
class Fault:
    """A fault: factors from a minute of the week on, for so many minutes, of one replica or (None) of all."""

    name: str
    at: int
    minutes: int
    replica: int | None
    rate: float = 1.0
    speed: float = 1.0
    ttft: float = 1.0
    answer: float = 1.0
    hits: float = 1.0
    acceptance: float = 1.0
    is_subtle: bool = False  # too small to be told from chance: it shows where the limit is


_HOUR, _DAY = 60, 1440
FAULTS = (
    Fault("a replica at half speed", 10 * _HOUR, 90, 1, speed=0.5),
    Fault("a replica at 0.7 of its speed, by night", _DAY + 3 * _HOUR, 120, 2, speed=0.7),
    Fault("all replicas at 0.7 of their speed", _DAY + 15 * _HOUR, 90, None, speed=0.7),
    Fault("a replica ends its answers early", 2 * _DAY + 11 * _HOUR, 60, 0, answer=0.25),
    Fault("a replica does not end its answers", 3 * _DAY + 9 * _HOUR, 60, 3, answer=3.0),
    Fault("the prefix cache is lost", 3 * _DAY + 16 * _HOUR, 90, None, hits=0.3),
    Fault("a replica's first tokens come late", 4 * _DAY + 10 * _HOUR, 60, 2, ttft=3.0),
    Fault("drafts are rejected", 4 * _DAY + 18 * _HOUR, 90, None, acceptance=0.6),
    Fault("four in five requests never come", 5 * _DAY + 13 * _HOUR, 45, None, rate=0.2),
    Fault("three times the requests", 6 * _DAY + 12 * _HOUR, 30, None, rate=3.0),
    Fault("a replica at 0.85 of its speed", 2 * _DAY + 16 * _HOUR, 90, 1, speed=0.85, is_subtle=True),
    Fault("answers a fifth shorter", 5 * _DAY + 18 * _HOUR, 60, None, answer=0.8, is_subtle=True),
)


class Minute(NamedTuple):
    at_s: float
    fault: Fault | None
    samples: dict[str, Sample]


def rate_of_week(minute: int) -> float:
    """Requests a minute: a day's curve, less at the weekend."""
    day, hour = minute // _DAY % 7, minute % _DAY / 60
    curve = 0.35 + 0.65 * (0.5 - 0.5 * cos(2 * pi * (hour - 4) / 24)) ** 1.5
    return 240.0 * float(curve) * (0.6 if day >= 5 else 1.0)


def minutes(
    seed: int,
    rate: Callable[[int], float] = rate_of_week,
    faults: Sequence[Fault] = FAULTS,
    weeks: int = 2,
    count: int | None = None,
) -> Iterator[Minute]:
    """The last week has the faults."""
    random = np.random.default_rng(seed)
    drift, first = 0.0, (weeks - 1) * MINUTES
    growth = 1.1  # from week to week
    for minute in range(count or weeks * MINUTES):
        drift = 0.98 * drift + random.normal(0.0, 0.02)
        fault = next((one for one in faults if 0 <= minute - first - one.at < one.minutes), None)
        per_minute = rate(minute) * exp(drift) * growth ** (minute / MINUTES)
        samples = {
            f"r{number}": _sample(random, per_minute / REPLICAS, fault if _is_hit(fault, number) else None)
            for number in range(REPLICAS)
        }
        yield Minute(_BEGAN + 60.0 * minute, fault, samples)


def _is_hit(fault: Fault | None, replica: int) -> bool:
    return fault is not None and fault.replica in (None, replica)


_NOTHING = Fault("", 0, 0, None)


def _sample(random: np.random.Generator, rate: float, fault: Fault | None) -> Sample:
    """Sums are drawn, not requests: a mean of so many is normal enough."""
    f, sample = fault or _NOTHING, Sample()
    n = sample.requests = sample.streams = int(random.poisson(rate * f.rate))
    if not n:
        return sample
    load = 1.0 - 0.15 * min(1.0, rate / 60.0)  # a fuller batch is slower
    spread = 1.0 / sqrt(n)
    sample.output = max(n, int(n * 200 * f.answer * exp(random.normal(0.0, 0.9 * spread))))
    sample.decoded = max(1, sample.output - n)
    sample.decode_s = sample.decoded / (50.0 * load * f.speed * exp(random.normal(0.0, 0.03 + 0.15 * spread)))
    sample.input = int(n * 1500 * exp(random.normal(0.0, 0.7 * spread)))
    hits = min(0.95, 0.55 * f.hits * exp(random.normal(0.0, 0.04 + 0.6 * spread)))
    sample.cached = int(sample.input * hits)
    sample.drafted = 3 * sample.output
    sample.accepted = int(sample.drafted * 0.6 * f.acceptance * exp(random.normal(0.0, 0.02 + 0.2 * spread)))
    base = 0.18 * f.ttft / load * (1.0 + (1.0 - f.hits) * 0.8)
    if random.random() < _BLIPS:
        sample.decode_s, base = 2 * sample.decode_s, 4 * base
    sample.ttfts = list(random.lognormal(np.log(base), 0.5, min(n, 32)))
    return sample


@dataclass
class Score:
    found: dict[str, float | None]  # by fault: minutes until something was said; None: never
    signals: dict[str, set[str]]
    false_alarms: list[tuple[int, str]]  # the minute, and what was said
    num_minutes: int


def watch_week(stream: Iterator[Minute], faults: Sequence[Fault] = FAULTS) -> Score:
    """Returns what the detectors say of it, minute by minute. An alarm counts once, when it begins."""
    siblings, deviations = Siblings(), Deviations("m", 60.0)
    score = Score({fault.name: None for fault in faults}, {fault.name: set() for fault in faults}, [], 0)
    said: set[str] = set()
    last, since, until = None, 0, -1
    for number, minute in enumerate(stream):
        if minute.fault is not None:
            if minute.fault is not last:
                last, since = minute.fault, number
            until = number + _AFTER
        siblings.period(minute.samples)
        deviations.period(minute.samples, minute.at_s)
        now = {f"{name or 'all'}:{signal}" for name, signal, _ in deviations.anomalies()}
        now |= {f"{name}:slow" for name, speed in siblings.speeds().items() if speed.is_slow}
        for alarm in sorted(now - said):
            if last is not None and number <= until:
                score.signals[last.name].add(alarm)
                if score.found[last.name] is None:
                    score.found[last.name] = number - since
            else:
                score.false_alarms.append((number, alarm))
        said = now
        score.num_minutes += 1
    return score


def trace_rate(path: Path) -> tuple[Callable[[int], float], int]:
    """Its requests per minute, over and over, scaled to a fleet like ours; and how many minutes it has."""
    counts: dict[int, int] = {}
    for arrival in read_trace(path):
        counts[int(arrival.at_s // 60)] = counts.get(int(arrival.at_s // 60), 0) + 1
    length = max(counts) or 1
    mean = sum(counts.values()) / length
    return lambda minute: 150.0 * counts.get(minute % length, 0) / mean, length


def main() -> None:
    parser = argparse.ArgumentParser(description="Detections and false alarms on synthetic weeks")
    parser.add_argument("--seeds", type=int, default=5, metavar="N")
    parser.add_argument("--trace", type=Path, nargs="*", default=[], metavar="FILE")
    arguments = parser.parse_args()
    scores = [watch_week(minutes(seed)) for seed in range(arguments.seeds)]
    print(f"| planted fault | found in {arguments.seeds} weeks | minutes until then, median | first said |")
    print("|---|---|---|---|")
    for fault in FAULTS:
        times = sorted(found for score in scores if (found := score.found[fault.name]) is not None)
        said = sorted(set.union(*(score.signals[fault.name] for score in scores)))
        print(f"| {fault.name} | {len(times)} | {times[len(times) // 2] if times else '-'} | {', '.join(said[:4])} |")
    alarms = [alarm for score in scores for alarm in score.false_alarms]
    series = REPLICAS * 6 + len(Signal)
    print(f"\nfalse alarms: {len(alarms)} in {2 * arguments.seeds} weeks of {series} series: {alarms[:5]}")
    for path in arguments.trace:
        rate, length = trace_rate(path)
        score = watch_week(minutes(0, rate, (), count=MINUTES), ())
        print(f"{path.name}: {length} minutes, repeated for a week: {len(score.false_alarms)} false alarms")


if __name__ == "__main__":
    main()
