"""Whether a replay is right: what it says of the other strategies from one log, beside what they really come to.

    python -m tools.routing.replayed TRACE [--first 0] [--count 3000] [--replicas 4] [--utilisation 0.7]

A simulated fleet takes the trace under `kv_aware` and writes a decision log, which is replayed against every strategy,
alone and carried along. Then the same trace is really run under each: that is what the replay should have said.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.gateway.records.decisions import Decided, Ended, decided
from penstock.replay.replay import Replay
from penstock.replay.report import Outcome, report
from penstock.router.router import Choice
from penstock.router.strategies import STRATEGIES, RoutingSettings
from penstock.sim.flight import Flight
from penstock.sim.profile import load_profile
from penstock.sim.simulation import Simulation
from penstock.sim.workload import replay, speed_for, that_fit
from penstock.workload.trace import read_trace


class Written:
    """The choices of a simulated gateway and what came of them, as a real one writes them down."""

    def __init__(self) -> None:
        self.entries: list[Decided | Ended] = []
        self._waits_s: dict[str, float] = {}

    def chosen(self, flight: Flight, choice: Choice, now: float) -> None:
        request = flight.request
        self.entries.append(decided(now, request, choice, now, request.model, "", ""))
        self._waits_s.setdefault(request.id, now - flight.ask.at_s)

    def ended(self, flight: Flight) -> None:
        """Notes the end of a request that was sent somewhere; of others there is no choice to judge."""
        waited_s = self._waits_s.pop(flight.request.id, None)
        if waited_s is None:
            return
        ask, first_s, ended_s = flight.ask, flight.first_s, flight.ended_s
        self.entries.append(
            Ended(
                flight.request.id,
                "failed" if flight.shed else "ok",
                flight.replica,
                ask.prompt_tokens,
                flight.cached_tokens,
                flight.generated,
                waited_s,
                None if first_s is None else first_s - ask.at_s,
                None if ended_s is None else ended_s - ask.at_s,
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--utilisation", type=float, default=0.7)
    parser.add_argument("--profile", default="h200-llama8b")
    given = parser.parse_args()
    profile = load_profile(given.profile)
    rows = that_fit(read_trace(given.trace, given.first, given.count), profile)
    speed = speed_for(rows, profile, given.replicas, given.utilisation)
    policies, written = {name: RoutingSettings(name) for name in STRATEGIES}, Written()
    recorded = Simulation(
        profile, given.replicas, policies["kv_aware"], chosen=written.chosen, ended=written.ended
    ).run(replay(rows, speed))
    alone, carried = (report(Replay(policies, carries=carries).read(written.entries)) for carries in (False, True))
    judged = alone.estimate.fitted
    print(f"the estimate explains {judged.explained:.0%} of what was measured" if judged else "nothing was measured")
    print(f"{'':18} {'reused':>7} {'alone':>7} {'carried':>8}   {'mean TTFT':>9} {'alone':>7} {'carried':>8}")

    def shown(outcome: Outcome) -> tuple[float, float]:
        return outcome.reused_tokens / alone.log.prompt_tokens, outcome.ttft.mean_s if outcome.ttft else 0.0

    for name, routing in policies.items():
        is_recorded = name == recorded.policy
        real = recorded if is_recorded else Simulation(profile, given.replicas, routing).run(replay(rows, speed))
        (hits, ttft_s), (carried_hits, carried_s) = shown(alone.others[name]), shown(carried.others[name])
        print(
            f"{name:18} {real.hit_rate:7.1%} {hits:7.1%} {carried_hits:8.1%}   {real.ttft_s.mean or 0.0:8.3f}s "
            f"{ttft_s:6.3f}s {carried_s:7.3f}s"
        )


if __name__ == "__main__":
    main()
