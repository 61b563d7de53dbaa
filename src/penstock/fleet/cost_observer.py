"""Step costs of a pool's replicas, learned from their reports: what the capacity profile is made of."""

from __future__ import annotations

from collections import deque

from penstock.core.measurements import EngineMeasurements
from penstock.fleet.policy.profile import ReplicaCosts, ReplicaReport

_POINTS = 64  # (sequences, seconds) of recent steps, per replica
_MATTERS = 0.1  # costs that have changed by less are the same costs
# A small model on a CPU; replaced by the first reports.
FIRST_GUESS = ReplicaCosts(fixed_s=0.002, read_s=0.008, linear_token_s=1 / 2000, sequence_s=0.001, kv_tokens=16_384)


class CostObserver:
    def __init__(self) -> None:
        self._steps: dict[str, deque[tuple[float, float]]] = {}
        self._reports: dict[str, ReplicaReport] = {}
        self.costs = FIRST_GUESS

    def observe(self, replica_id: str, measured: EngineMeasurements) -> None:
        speeds, limits, running = measured.speeds, measured.limits, measured.load.num_running
        points = self._steps.setdefault(replica_id, deque(maxlen=_POINTS))
        if speeds.decode_step_s is not None and running and (running, speeds.decode_step_s) not in points:
            points.append((running, speeds.decode_step_s))
        if speeds.prefill_tokens_per_s is not None and points:
            self._reports[replica_id] = ReplicaReport(
                speeds.prefill_tokens_per_s,
                tuple(points),
                limits.kv_capacity_tokens,
                limits.max_sequences,
                limits.chunk_tokens,
            )

    def forget(self, replica_id: str) -> None:
        """Its numbers stay until a successor has some: the pool's costs outlive its replicas."""
        if len(self._reports) > 1:
            self._reports.pop(replica_id, None)
        self._steps.pop(replica_id, None)

    def has_changed(self) -> bool:
        """Takes what was observed into `costs`. Returns whether that makes a difference."""
        found = ReplicaCosts.from_reports(self._reports.values())
        if found is None or _is_like(found, self.costs):
            return False
        self.costs = found
        return True


def _is_like(one: ReplicaCosts, other: ReplicaCosts) -> bool:
    names = ("fixed_s", "read_s", "linear_token_s", "sequence_s", "kv_tokens", "max_num_seqs", "chunk_tokens")
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    return all(abs(a - b) <= _MATTERS * max(a, b, 1e-9) for a, b in pairs)
