"""One rollout on a clock of its own: traffic, evidence and the real policy, until it is over or a person is needed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.core.rollout import BLOCK_S, TIMES, Arm, Metric
from penstock.rollout.policy.decide import decide, start
from penstock.rollout.policy.gates import evidence_for
from penstock.rollout.policy.plan import RolloutPlan
from penstock.rollout.policy.state import Phase, PoolSeen, Seen, StoryEntry, targets
from penstock.sim.rollout.traffic import MINUTE_S, Regression, Traffic, World

_MAX_S = 48 * 3600.0
_MAX_HOLD_S = 3600.0
_READY = PoolSeen(ready=12)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one rollout."""

    regression: str
    seed: int
    phase: Phase
    step: int  # that it ended in
    seconds: float  # until all clients are at the new version for good, or until it was aborted or paused
    exposed: int  # requests of clients that the new version answered
    copies: int
    reason: str
    gates: tuple[str, ...]  # that said worse
    story: tuple[StoryEntry, ...]

    @property
    def is_aborted(self) -> bool:
        return self.phase is Phase.ABORTED

    @property
    def is_in_shadow(self) -> bool:
        return self.is_aborted and not self.exposed


def run_rollout(seed: int, regression: Regression, plan: RolloutPlan, world: World | None = None) -> Outcome:
    traffic = Traffic(seed, regression, world)
    now = 1_700_000_000.0 // MINUTE_S * MINUTE_S
    began = now
    weights, shadow = {"v1": 100.0, "v2": 0.0}, {"v1": 0.0, "v2": 0.0}
    plan = replace(plan, hold_s=min(plan.hold_s, _MAX_HOLD_S))
    state = start(
        "r", model="m", old="v1", new="v2", plan=plan, now=now, weights=weights, shadow=shadow, by="sim"
    ).state
    evidence = evidence_for(state)
    story: list[StoryEntry] = []
    exposed = copies = 0
    while not state.is_over and state.phase is not Phase.PAUSED and now - began < _MAX_S:
        blocks = traffic.minute(now, state.step, state.current_step)
        for block in blocks:
            now = block.at + BLOCK_S
            is_watched = state.phase in (Phase.WATCHING, Phase.HOLDING)
            if is_watched:
                for key, cell in block.cells:
                    if key.metric is Metric.ERRORS and not key.tenant:
                        exposed += cell.count if key.arm is Arm.NEW else 0
                        copies += cell.count if key.arm is Arm.NEW_COPY else 0
                if block.at < state.settle_until:  # as gateways do: errors count from the first request on
                    block.cells = [(key, cell) for key, cell in block.cells if key.metric not in TIMES]
                evidence.add(block)
            step = state.step
            for _ in range(4):  # the shell looks once a second
                wanted = targets(state)
                if wanted.weights is not None and wanted.shadow is not None:
                    weights, shadow = wanted.weights, wanted.shadow
                decision = decide(state, evidence, Seen(_READY, _READY, weights, shadow), now, with_intervals=False)
                if decision.entry is not None:
                    story.append(decision.entry)
                state = decision.state
                if state.phase in (Phase.WATCHING, Phase.PAUSED, Phase.HOLDING) or state.is_over:
                    break
            if state.step != step or state.is_over or state.phase is Phase.PAUSED:
                break
    is_promoted = state.phase is Phase.PROMOTED
    ended = next((one.at for one in story if one.what == "holding"), now)
    gates = tuple(
        gate.gate + (f" of {gate.tenant}" if gate.tenant else "")
        for gate in (story[-2].gates if len(story) > 1 and state.phase is Phase.ABORTED else [])
        if gate.verdict == "worse"
    )
    return Outcome(
        regression.name,
        seed,
        state.phase,
        state.step,
        (ended if is_promoted else now) - began,
        exposed,
        copies,
        state.reason,
        gates,
        tuple(story),
    )
