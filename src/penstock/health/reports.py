"""Reports of a penstock replica, as the edge's policies see them."""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import urlsplit

from penstock.api.replica_report import ReplicaReport
from penstock.core.measurements import EngineMeasurements, EngineSpeeds
from penstock.core.replica import HOST_SHARE, KV_PULL_TOKENS_PER_S, ReplicaSnapshot, ReplicaState

GUESSED_SPEED = 2000.0  # tokens per second, of a replica that has measured nothing yet


def snapshot_of(report: ReplicaReport, last: ReplicaSnapshot, heard_at: float) -> ReplicaSnapshot:
    """`last`: of the same replica. What a replica does not say, as long as it loads, stays as it was; a size that
    nobody has ever said has no bound."""
    state = ReplicaState.READY
    if report.is_draining:
        state = ReplicaState.DRAINING
    elif report.state != "ready":
        state = ReplicaState.OUT
    measured = report.measured
    return ReplicaSnapshot(
        id=last.id,
        url=last.url,
        models=last.models,
        taken_at=heard_at,
        stale_after_s=last.stale_after_s,
        limits=measured.limits if measured.limits.kv_capacity_tokens else last.limits,
        load=measured.load,
        adapters=frozenset([one.name for one in report.adapters]) if report.adapters else frozenset(),
        warm_adapters=frozenset([one.name for one in report.adapters if one.is_on_device]),
        role=report.role,
        kv_address=kv_address(last.url, report.kv_port) if not measured.device.device_fault else "",
        kv_layout=report.kv_layout,
        prefill_tokens_per_s=measured.speeds.prefill_tokens_per_s or GUESSED_SPEED,
        decode_tokens_per_s=decode_speed(measured),
        host_share=host_share(measured.speeds),
        kv_pull_tokens_per_s=measured.speeds.kv_pull_tokens_per_s or KV_PULL_TOKENS_PER_S,
        state=state,
    )


def decode_speed(measured: EngineMeasurements) -> float:
    """Tokens per second of its whole batch, as large as it is now."""
    step_s = measured.speeds.decode_step_s
    return max(measured.load.num_running, 1) / step_s if step_s else GUESSED_SPEED


def host_share(speeds: EngineSpeeds) -> float:
    """Returns what a token from its host memory costs, as a part of one that it computes: by its measures of both."""
    prefill, host = speeds.prefill_tokens_per_s, speeds.host_tokens_per_s
    return min(1.0, prefill / host) if prefill and host else HOST_SHARE


@lru_cache(maxsize=4096)
def kv_address(url: str, kv_port: int) -> str:
    """The address of a replica's KV transfer: the host of its URL, and a port of its own; empty: it has none."""
    host = urlsplit(url).hostname
    if not host or not kv_port:
        return ""
    return f"[{host}]:{kv_port}" if ":" in host else f"{host}:{kv_port}"
