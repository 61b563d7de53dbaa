"""What a penstock replica reports of itself, as the edge's policies see it."""

from __future__ import annotations

from penstock.api.replica_report import ReplicaReport
from penstock.core.measurements import EngineSpeeds
from penstock.core.replica import HOST_SHARE, ReplicaSnapshot, ReplicaState

GUESSED_SPEED = 2000.0  # tokens per second, of a replica that has measured nothing yet


def snapshot_of(report: ReplicaReport, last: ReplicaSnapshot, heard_at: float) -> ReplicaSnapshot:
    """`last`: of the same replica. What a replica does not say, as long as it loads, stays as it was; a size that
    nobody has ever said has no bound."""
    state = ReplicaState.READY
    if report.is_draining:
        state = ReplicaState.DRAINING
    elif report.state != "ready":
        state = ReplicaState.OUT
    load, limits, speeds = report.measured.load, report.measured.limits, report.measured.speeds
    step_s = speeds.decode_step_s
    return ReplicaSnapshot(
        id=last.id,
        url=last.url,
        models=last.models,
        taken_at=heard_at,
        max_sequences=limits.max_sequences or 1,
        max_context_tokens=limits.max_model_len or last.max_context_tokens,
        kv_capacity_tokens=limits.kv_capacity_tokens or last.kv_capacity_tokens,
        step_tokens=limits.chunk_tokens or 1,
        prefill_tokens_per_s=speeds.prefill_tokens_per_s or GUESSED_SPEED,
        decode_tokens_per_s=max(load.num_running, 1) / step_s if step_s else GUESSED_SPEED,
        waiting=load.num_queued,
        running=load.num_running,
        prefill_tokens=load.queued_tokens,
        kv_active_tokens=load.kv_active_tokens,
        host_share=host_share(speeds),
        steps=load.steps,
        state=state,
        adapters=frozenset([one.name for one in report.adapters]) if report.adapters else frozenset(),
        warm_adapters=frozenset([one.name for one in report.adapters if one.is_on_device]),
    )


def host_share(speeds: EngineSpeeds) -> float:
    """What a token from its host memory costs, of one that it computes: by what it has measured of both."""
    prefill, host = speeds.prefill_tokens_per_s, speeds.host_tokens_per_s
    return min(1.0, prefill / host) if prefill and host else HOST_SHARE
