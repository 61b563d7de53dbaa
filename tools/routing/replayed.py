"""Whether a replay is right: what it says of the other strategies from one log, beside what they really come to.

    python -m tools.routing.replayed TRACE [--first 0] [--count 3000] [--speed 1.0] [--replicas 4]

A simulated fleet takes the trace under `kv_aware` and writes a decision log, which is replayed against every strategy,
alone and carried along. Then the same trace is really run under each: that is what the replay should have said.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.routing.simulation import Job, Simulation
from tools.routing.table import measure

from penstock.admission.decision import Admit, Decision
from penstock.gateway.decisions import Decided, Ended, decided
from penstock.replay.replay import Replay
from penstock.replay.report import Outcome, report
from penstock.router.strategies import STRATEGIES, RoutingSettings
from penstock.workload.trace import Arrival, read_trace


class Recorded(Simulation):
    """It writes down its choices, as a gateway does."""

    def __init__(self, routing: RoutingSettings, num_replicas: int) -> None:
        self.entries: list[Decided | Ended] = []
        self._waits_s: dict[str, float] = {}
        super().__init__(routing, num_replicas)

    def _take(self, decision: Decision) -> None:
        if isinstance(decision, Admit):
            self.entries.append(decided(self.now, decision.request, decision.choice, self.now, "m", "", ""))
            self._waits_s[decision.request.id] = decision.waited_s
        super()._take(decision)

    def done(self, job: Job) -> None:
        super().done(job)
        name, prompt, waited_s = job.request.id, job.request.prompt_tokens, self._waits_s[job.request.id]
        end = Ended(name, "ok", job.replica, prompt, job.hit, job.output, waited_s, job.ttft_s, self.now - job.asked_at)
        self.entries.append(end)


def record(rows: list[Arrival], num_replicas: int, speed: float) -> list[Decided | Ended]:
    sim = Recorded(RoutingSettings("kv_aware"), num_replicas)
    sim.run(sim.ask_all(rows, speed * num_replicas / 4) + 60.0)
    return sim.entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--replicas", type=int, default=4)
    given = parser.parse_args()
    rows = read_trace(given.trace, given.first, given.count)
    entries = record(rows, given.replicas, given.speed)
    policies = {name: RoutingSettings(name) for name in STRATEGIES}
    alone, carried = (report(Replay(policies, carries=carries).read(entries)) for carries in (False, True))
    judged = alone.estimate.fitted
    print(f"the estimate explains {judged.explained:.0%} of what was measured" if judged else "nothing was measured")
    print(f"{'':18} {'reused':>7} {'alone':>7} {'carried':>8}   {'mean TTFT':>9} {'alone':>7} {'carried':>8}")

    def shown(outcome: Outcome) -> tuple[float, float]:
        return outcome.reused_tokens / alone.log.prompt_tokens, outcome.ttft.mean_s if outcome.ttft else 0.0

    for name in STRATEGIES:
        real = measure(rows, policies[name], given.replicas, given.speed)
        (hits, ttft_s), (carried_hits, carried_s) = shown(alone.others[name]), shown(carried.others[name])
        print(
            f"{name:18} {real.hit_rate:7.1%} {hits:7.1%} {carried_hits:8.1%}   {real.mean_ttft_s:8.3f}s {ttft_s:6.3f}s "
            f"{carried_s:7.3f}s"
        )


if __name__ == "__main__":
    main()
