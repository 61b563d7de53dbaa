"""Verdicts in words: one sentence each, with the numbers that it stands on."""

from __future__ import annotations

from penstock.rollout.policy.state import GateResult

_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "device_time": "device time per token", "cost": "cost per token"}


def sentence(gate: GateResult, old: str) -> str:
    """Such as: TPOT 1.24 x [1.18, 1.31] of v1's over 840 and 16,020 requests, margin 1.03: worse."""
    what = gate_title(gate.gate) + (f" of {gate.tenant}" if gate.tenant else "")
    counts = f"over {gate.new_count:,} and {gate.old_count:,} requests"
    if gate.estimate is None or gate.low is None:
        return f"{what} {counts}: {gate.verdict}"
    if gate.is_ratio:
        high = "more" if gate.high is None else f"{gate.high:.3g}"
        numbers = f"{gate.estimate:.3g} x [{gate.low:.3g}, {high}] of {old}'s"
        return f"{what} {numbers} {counts}, margin {1 + gate.margin:.4g}: {gate.verdict}"
    if gate.high is None:
        return f"{what} {counts}: {gate.verdict}"
    numbers = f"{100 * gate.estimate:+.2f} [{100 * gate.low:+.2f}, {100 * gate.high:+.2f}] points of {old}'s"
    return f"{what} {numbers} {counts}, margin {100 * gate.margin:.3g}: {gate.verdict}"


def gate_title(gate: str) -> str:
    metric, _, percent = gate.partition("_p")
    if percent.isdigit():
        return f"p{percent} {_NAMES.get(metric, metric)}"
    return _NAMES.get(gate, gate.replace("_", " "))
