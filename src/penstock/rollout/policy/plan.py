"""The plan of a rollout: its steps, its gates with their margins, and what becomes of the old version at the end.

Nothing of it has to be written: `default_plan` derives it from the objectives of the model (`core.slo.Slo`), and a file
says what differs.

    steps: [{shadow: 0.05}, {share: 0.1, min_s: 300}, {share: 1}]
    gates: {tpot: {margin: 0.1}, ttft_p99: {margin: 0.2}, cost: {enabled: false}}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.core.config import build, suggestion
from penstock.core.errors import ConfigError
from penstock.core.rollout import TIMES, Metric
from penstock.core.settings import setting
from penstock.core.slo import Slo

Amount = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
Undecided = Literal["abort", "pause", "proceed"]

_QUANTILE = re.compile(r"(?P<metric>[a-z_]+)_p(?P<percent>\d{2,3})")
_WITH_QUANTILES = (Metric.TTFT, Metric.TPOT, Metric.LATENCY)
# Of copies alone. Clients' lengths are those of the few sessions that a small share has: other people ask other things.
OF_COPIES = frozenset({Metric.DISAGREEMENT, Metric.DIVERGENCE, Metric.JUDGED_WORSE, Metric.OUTPUT_TOKENS})


@dataclass(frozen=True)
class RolloutStep:
    shadow: Share | None = setting(None, "share of the clients' requests that both versions are sent copies of")
    share: Share | None = setting(None, "share of the clients that the new version serves")
    min_s: Amount = setting(300.0, "seconds that the step takes at least")
    min_requests: Annotated[int, Meta(ge=0)] = setting(
        100,
        "requests, or copies, that the new version must have ended in it; it pauses where they have not come within "
        "four times `max_s`",
    )
    max_s: Annotated[float, Meta(gt=0)] = setting(3600.0, "its limit, whatever gate is undecided")
    undecided: Undecided | None = setting(
        None, "what happens at its end if a gate is undecided; none: what the gate says"
    )

    def __post_init__(self) -> None:
        if (self.shadow is None) == (self.share is None):
            raise ConfigError("a step has either `shadow` or `share`", param="share")
        if self.max_s < self.min_s:
            raise ConfigError(f"a step cannot take at least {self.min_s:g} and at most {self.max_s:g} s", param="max_s")

    @property
    def is_shadow(self) -> bool:
        return self.shadow is not None

    @property
    def title(self) -> str:
        return f"shadow {_percent(self.shadow or 0.0)}" if self.share is None else _percent(self.share)


@dataclass(frozen=True)
class GateSettings:
    """One comparison of the new version with the old one."""

    margin: Annotated[float, Meta(gt=0)] = setting(
        0.05,
        "how much worse is still equal: of times, lengths and costs a part of the old version's, of shares and scores "
        "a difference",
    )
    waits: bool = setting(
        False,
        "whether a step that has taken its `min_s` goes on, until its `max_s`, while the gate is undecided; false: "
        "only while its estimate is beyond the margin",
    )
    undecided: Undecided = setting("proceed", "what happens at a step's end if it is undecided")
    tenants: bool = setting(False, "whether the largest tenants have a gate each beside the one of all")
    enabled: bool = setting(True, "false: there is no such gate")


@dataclass(frozen=True)
class RolloutPlan:
    steps: tuple[RolloutStep, ...] = ()
    gates: dict[str, GateSettings] = field(default_factory=dict)
    alpha: Annotated[float, Meta(gt=0, le=0.2)] = setting(
        0.01, "probability at most that a version that is equal is aborted, over all gates, tenants and steps"
    )
    tenants: Annotated[int, Meta(ge=0, le=50)] = setting(5, "tenants, the largest, that have gates of their own")
    settle_s: Amount = setting(
        30.0, "after shares have changed, requests are not measured for so long: caches are cold"
    )
    capacity_wait_s: Amount = setting(1800.0, "a new version without enough ready replicas for longer pauses it")
    unready_s: Amount = setting(
        15.0, "a new version that clients are sent to and that has no ready replica for so long is aborted"
    )
    on_promote: Literal["hold", "park", "release"] = setting(
        "hold", "the old version's replicas after the last step: active or parked for `hold_s`, or released at once"
    )
    hold_s: Amount = setting(3600.0, "how long the old version can be gone back to at once")
    embedder: str = setting("", "model whose embeddings say how alike two answers are; empty: the same text or not")
    judge: str = setting("", "model that is asked which of two answers is better; empty: none")
    scores: bool = setting(False, "both versions score the same answers, for the divergence of their log-probabilities")

    def __post_init__(self) -> None:
        for name in self.gates:
            gate_metric(name)
        shares = [step.share for step in self.steps if step.share is not None]
        if any(later <= earlier for earlier, later in pairwise(shares)):
            raise ConfigError(f"shares must grow from step to step: {_listed(shares)}", param="steps")
        if self.steps and (not shares or shares[-1] != 1.0):
            raise ConfigError("the last step must have `share: 1`: all clients", param="steps")
        if any(step.is_shadow for step in self.steps[len(self.steps) - len(shares) :]):
            raise ConfigError("steps with `shadow` come before those with `share`", param="steps")

    @property
    def enabled_gates(self) -> dict[str, GateSettings]:
        return {name: gate for name, gate in self.gates.items() if gate.enabled}

    def yaml(self) -> str:
        """The plan as a file that says the same."""
        import yaml

        return str(yaml.safe_dump(msgspec.to_builtins(self), sort_keys=False))


@cache
def gate_metric(name: str) -> tuple[Metric, float | None]:
    """The metric that a gate's name says, and the quantile: None for its mean. Raises ConfigError."""
    known = list(Metric)
    if name in known:
        return Metric(name), None
    if (found := _QUANTILE.fullmatch(name)) and found["metric"] in _WITH_QUANTILES:
        percent = found["percent"]
        if 0 < (quantile := float(f"0.{percent}")) < 1:
            return Metric(found["metric"]), quantile
    shown = [*known, *(f"{metric}_p95" for metric in _WITH_QUANTILES)]
    raise ConfigError(f"no gate '{name}'{suggestion(name, shown)}", param=f"gates.{name}")


def is_ratio(metric: Metric) -> bool:
    """Whether a gate compares by ratio; all others by difference."""
    return metric in TIMES


def default_plan(slo: Slo) -> RolloutPlan:
    """Steps as most teams take them, and margins from what the objectives leave:

    - errors may be more by the share of them that the objective allows, refusals by a tenth of the requests that may
      miss a target;
    - mean times by 3 % where there is a target for them, by 10 % where there is none;
    - the quantile of the objective by 10 %.

    Steps wait for the mean times that have a target: other gates can stop a rollout, but they do not slow it down.
    """
    percent = f"{slo.quantile:.10g}"[2:].ljust(2, "0")

    def of_time(target: float | None, margin: float) -> GateSettings:
        return GateSettings(margin if target is not None else 0.1, waits=target is not None, tenants=True)

    gates = {
        Metric.TTFT: of_time(slo.ttft_s, 0.05),
        Metric.TPOT: of_time(slo.tpot_s, 0.03),
        Metric.LATENCY: of_time(slo.latency_s, 0.05),
        **{f"{metric}_p{percent}": GateSettings(0.1) for metric in _WITH_QUANTILES},
        Metric.OUTPUT_TOKENS: GateSettings(0.1),
        Metric.DEVICE_TIME: GateSettings(0.1),
        Metric.COST: GateSettings(0.1),
        Metric.ERRORS: GateSettings(slo.errors, tenants=True),
        Metric.REFUSALS: GateSettings((1.0 - slo.quantile) / 10.0),
        Metric.INVALID_GUIDED: GateSettings(0.01),
        Metric.INVALID_TOOLS: GateSettings(0.01),
        Metric.DISAGREEMENT: GateSettings(0.02),
        Metric.DIVERGENCE: GateSettings(0.05),
        Metric.JUDGED_WORSE: GateSettings(0.05),
        Metric.COMPLAINTS: GateSettings(0.02),
    }
    steps = (
        RolloutStep(shadow=0.05, min_requests=100, max_s=900.0),
        RolloutStep(share=0.01, min_requests=20, max_s=600.0),
        RolloutStep(share=0.05, min_requests=100, max_s=900.0),
        RolloutStep(share=0.25, min_s=600.0, min_requests=500, max_s=1800.0),
        RolloutStep(share=0.5, min_s=600.0, min_requests=1000, max_s=1800.0),
        RolloutStep(share=1.0, min_s=600.0, min_requests=1000, max_s=1800.0),
    )
    return RolloutPlan(steps, {str(name): gate for name, gate in gates.items()})


def plan_from(values: Mapping[str, Any], slo: Slo) -> RolloutPlan:
    """The plan that a file's values say, over the default one. Gates are named one by one: those that are not stay;
    steps are replaced whole. Raises ConfigError."""
    default = default_plan(slo)
    rest = {key: value for key, value in values.items() if key not in ("steps", "gates")}
    plan = build(RolloutPlan, rest)
    steps, gates = default.steps, dict(default.gates)
    if (given := values.get("steps")) is not None:
        if not isinstance(given, list) or not given or not all(isinstance(step, Mapping) for step in given):
            raise ConfigError("`steps` is a list of mappings, each with `shadow` or `share`", param="steps")
        steps = tuple(build(RolloutStep, step, where=f"steps.{place}.") for place, step in enumerate(given))
    if (changed := values.get("gates")) is not None:
        if not isinstance(changed, Mapping):
            raise ConfigError("`gates` is a mapping: a metric's name and what its gate has", param="gates")
        for name, gate in changed.items():
            gate_metric(str(name))
            gates[str(name)] = _changed_gate(str(name), gate, gates.get(str(name)))
    return replace(plan, steps=steps, gates=gates)


def _changed_gate(name: str, values: Any, default: GateSettings | None) -> GateSettings:
    if not isinstance(values, Mapping):
        raise ConfigError(f"gate '{name}' is a mapping, such as {{margin: 0.05}}", param=f"gates.{name}")
    gate = build(GateSettings, values, where=f"gates.{name}.")
    if default is None:
        return gate
    return replace(default, **{one.name: getattr(gate, one.name) for one in fields(gate) if one.name in values})


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"


def _listed(shares: list[float]) -> str:
    return ", ".join(_percent(share) for share in shares)
