"""A decision in plain words: what was wanted and why, what was seen, what was done, and until when it held."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

from penstock.fleet.policy.decision import Action, ActionKind, Decision
from penstock.fleet.policy.observation import CapacityType, ReplicaState

_BOUNDS = {
    "min": "the pool's `min`",
    "max": "the pool's `max`",
    "spend": "the spend per hour",
    "quota": "the devices that there are",
    "schedule": "a schedule of the pool",
}
_NUMBERS = {
    "rate": "{:.3g} requests/s",
    "planned_rate": "{:.3g} requests/s planned for",
    "needed": "{:g} needed now",
    "held": "{:g} needed within the cooldown and by the forecast",
    "max_rate": "{:.3g} requests/s per replica within the SLO",
    "backlog": "{:.3g} requests in queues",
    "slowdown": "steps {:.3g} times as long as profiled",
    "predicted_ttft_s": "a TTFT of {:.3g} s predicted",
    "predicted_tpot_s": "a TPOT of {:.3g} s predicted",
    "predicted_kv_usage": "a KV use of {:.0%} predicted",
}
_FORECAST = re.compile(r"forecast_p(\d+)_(\d+)s")


def explain(decision: Decision, before: Decision | None = None, after: Decision | None = None) -> Iterator[str]:
    """Lines of text. `before`, `after`: the pool's decisions next to it, where they are known."""
    change = f", {before.wanted} before" if before is not None and before.wanted != decision.wanted else ""
    active = "no active replica" if not decision.wanted else f"{_replicas(decision.wanted)} active"
    warm = [
        f"{count} {state}" for state, count in (("standby", decision.standby), ("parked", decision.parked)) if count
    ]
    yield f"{_time(decision.at)} {decision.pool}: {', '.join([active, *warm])} wanted{change}"
    if decision.reason:
        yield f"    why: {decision.reason}"
    if decision.bound:
        yield f"    bound by {_BOUNDS.get(decision.bound, decision.bound)}; the demand alone asks for another number"
    if decision.warm_bound:
        what = _BOUNDS.get(decision.warm_bound, decision.warm_bound)
        yield f"    warm replicas: {what} allows no more; as many are planned as above"
    if decision.numbers:
        yield f"    seen: {', '.join(number_in_words(name, value) for name, value in decision.numbers.items())}"
    for action in decision.actions:
        yield f"    done: {_action(action)}"
    if after is not None:
        yield f"    until {_time(after.at)}: {_replicas(after.wanted)} wanted from then on"


def number_in_words(name: str, value: float) -> str:
    if (found := _NUMBERS.get(name)) is not None:
        return found.format(value)
    if (forecast := _FORECAST.fullmatch(name)) is not None:
        quantile, seconds = forecast.groups()
        likely = "expected" if quantile == "50" else f"at most (p{quantile})"
        return f"{value:.3g} requests/s {likely} in {seconds} s"
    return f"{name.replace('_', ' ')} {value:g}"


def _action(action: Action) -> str:
    which = action.replica or "a new replica"
    where = f" in zone {action.zone}" if action.zone else ""
    kind = f" on {action.capacity_type} capacity" if action.capacity_type is not CapacityType.ON_DEMAND else ""
    is_plain = action.kind is ActionKind.PARK or action.to is ReplicaState.ACTIVE
    to = "" if is_plain else f" to {action.to}"
    return f"{action.kind} {which}{to}{where}{kind}: {action.reason}"


def _replicas(count: int) -> str:
    return f"{count} replica" if count == 1 else f"{count} replicas"


def _time(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
