"""Counters of one version of a model, as the protocol's statistics call shows them: times in nanoseconds."""

from __future__ import annotations

from typing import Any

_STEPS = ("queue", "compute_input", "compute_infer", "compute_output")
MAX_SIZES = 1024  # of batches, with counters of their own


class Duration:
    __slots__ = ("count", "ns")

    def __init__(self) -> None:
        self.count = self.ns = 0

    def add(self, seconds: float, count: int = 1) -> None:
        self.count += count
        self.ns += round(1e9 * seconds) * count

    def as_dict(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}


class BatchTimes:
    """Seconds that an execution took: to put inputs together, to compute, to take outputs apart."""

    __slots__ = ("infer_s", "input_s", "output_s")

    def __init__(self, input_s: float, infer_s: float, output_s: float) -> None:
        self.input_s = input_s
        self.infer_s = infer_s
        self.output_s = output_s

    def __iter__(self) -> Any:
        return iter((self.input_s, self.infer_s, self.output_s))


class Statistics:
    def __init__(self) -> None:
        self.last_inference_ms = 0  # Unix time
        self.inferences = 0  # rows
        self.executions = 0
        self.success, self.fail = Duration(), Duration()
        self.refusals = 0  # of requests that no instance was given: they are among those that failed
        self.steps = {name: Duration() for name in _STEPS}
        self.sizes: dict[int, tuple[Duration, Duration, Duration]] = {}

    def executed(self, size: int, num_requests: int, times: BatchTimes) -> None:
        self.executions += 1
        for name, seconds in zip(_STEPS[1:], times, strict=True):
            self.steps[name].add(seconds, num_requests)
        if size not in self.sizes and len(self.sizes) >= MAX_SIZES:
            return
        of_size = self.sizes.setdefault(size, (Duration(), Duration(), Duration()))
        for one, seconds in zip(of_size, times, strict=True):
            one.add(seconds)

    def answered(self, size: int, queue_s: float, total_s: float, now_unix_s: float) -> None:
        self.inferences += size
        self.last_inference_ms = round(1e3 * now_unix_s)
        self.steps["queue"].add(queue_s)
        self.success.add(total_s)

    def failed(self, total_s: float) -> None:
        self.fail.add(total_s)

    def refused(self, total_s: float) -> None:
        self.refusals += 1
        self.failed(total_s)

    @property
    def mean_queue_s(self) -> float | None:
        """None: no request has come to an instance yet."""
        queue = self.steps["queue"]
        return 1e-9 * queue.ns / queue.count if queue.count else None

    def as_dict(self, name: str, version: str) -> dict[str, Any]:
        nothing = Duration().as_dict()
        shown = {"success": self.success.as_dict(), "fail": self.fail.as_dict()}
        shown |= {step: one.as_dict() for step, one in self.steps.items()}
        return {
            "name": name,
            "version": version,
            "last_inference": self.last_inference_ms,
            "inference_count": self.inferences,
            "execution_count": self.executions,
            "inference_stats": shown | {"cache_hit": nothing, "cache_miss": nothing},
            "batch_stats": [
                {"batch_size": size} | {step: one.as_dict() for step, one in zip(_STEPS[1:], of_size, strict=True)}
                for size, of_size in sorted(self.sizes.items())
            ],
        }
