"""Every alert there is: what it means, whether it gets somebody up, how long it must last, and where to read on.

The docs' table and the rules for Prometheus are made from this.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

RUNBOOKS = "docs/runbooks"


class Severity(StrEnum):
    PAGE = "page"  # somebody must look now
    TICKET = "ticket"  # in working hours


@dataclass(frozen=True)
class AlertKind:
    name: str
    severity: Severity
    means: str
    runbook: str
    for_s: float = 0.0  # it must hold for so long
    rank: int = 0  # what explains another of a lower or the same rank hides it

    @property
    def page(self) -> str:
        return f"{RUNBOOKS}/{self.runbook}.md"


_RISK, _BURN, _CAUSE, _FAST, _SYMPTOM, _ROOT = range(6)  # ranks


def _page(name: str, runbook: str, rank: int, means: str, for_s: float = 0.0) -> AlertKind:
    return AlertKind(name, Severity.PAGE, means, runbook, for_s, rank)


def _ticket(name: str, runbook: str, rank: int, means: str, for_s: float = 0.0) -> AlertKind:
    return AlertKind(name, Severity.TICKET, means, runbook, for_s, rank)


GPU_XID = _page("GpuXid", "gpu-xid", _ROOT, "a device reported an Xid error, or has a fault")
OOM_KILL = _page("OutOfMemoryKill", "out-of-memory-kill", _ROOT, "the kernel killed a replica's process for its memory")
CRASH = _page("ProcessCrash", "process-crash", _ROOT, "a replica's process or engine died without being told to")
POISON = _page(
    "RequestQuarantined", "request-quarantined", _ROOT, "two replicas were lost with the same request, which is refused"
)
MODEL_DOWN = _page("ModelDown", "model-down", _ROOT, "no replica of a model can be used", for_s=30.0)
WRONG_ANSWERS = _page(
    "WrongAnswers", "wrong-answers", _ROOT, "a replica answers known questions otherwise than it should"
)
TTFT_FAR_OVER = _page(
    "TtftFarOverTarget", "ttft-far-over-target", _SYMPTOM, "TTFT p99 is over twice its target", for_s=120.0
)
BURNING_FAST = _page(
    "BudgetBurningFast", "budget-burning", _FAST, "an error budget burns 14.4 times too fast: a fiftieth of it an hour"
)
BURNING = _ticket(
    "BudgetBurning", "budget-burning", _BURN, "an error budget burns ten times too fast, or has for long", for_s=120.0
)
AT_RISK = _ticket(
    "ObjectiveAtRisk", "objective-at-risk", _RISK, "80 % (warning) or 100 % (critical) of a target is used", for_s=300.0
)
SLOW = _ticket("ReplicaSlow", "replica-slow", _CAUSE, "a replica is clearly slower than its siblings")
QUEUE = _ticket(
    "QueueSustained", "queue-sustained", _CAUSE, "requests have waited at the gateway for long", for_s=180.0
)
GPU_IDLE = _ticket("GpuUnderused", "gpu-underused", _CAUSE, "a device has been under 30 % for an hour", for_s=3600.0)
GPU_FULL = _ticket("GpuSaturated", "gpu-saturated", _CAUSE, "a device has been over 95 % for an hour", for_s=3600.0)
FRAGMENTED = _ticket(
    "FragmentationRising", "fragmentation-rising", _CAUSE, "ever more of a KV cache is held and not filled"
)
PROBE_FAILING = _ticket("ProbeFailing", "probe-failing", _CAUSE, "known questions to a replica bring no answer")
CONTROLLER_DOWN = _page(
    "FleetControllerDown", "fleet-controller-down", _CAUSE, "no controller looks after a pool of the fleet", for_s=60.0
)
AT_BOUND = _ticket(
    "PoolAtBound",
    "pool-at-bound",
    _CAUSE,
    "a pool may not grow (max, spend, quota), and its demand needs it",
    for_s=120.0,
)
START_SLOW = _ticket(
    "ReplicaStartSlow", "replica-start-slow", _CAUSE, "a replica has been starting for over twice the usual time"
)
STARTS_FAILING = _ticket(
    "ReplicaStartsFailing",
    "replica-starts-failing",
    _CAUSE,
    "three or more starts of a pool's replicas failed in a row",
)
FLAPPING = _ticket(
    "ScalingFlaps", "scaling-flaps", _CAUSE, "three or more steps of an hour were taken back within five minutes"
)
ROLLOUT_ABORTED = _ticket(
    "RolloutAborted", "rollout-aborted", _CAUSE, "a new version was found worse, and the old one has the clients again"
)
ROLLOUT_STUCK = _ticket(
    "RolloutStuck", "rollout-stuck", _RISK, "a rollout is paused, waits or is looked at by nobody for too long"
)
ANOMALY = _ticket("Anomaly", "anomaly", _CAUSE, "a signal is far from its own past, or from its siblings")

KINDS: tuple[AlertKind, ...] = tuple(value for value in list(globals().values()) if isinstance(value, AlertKind))
