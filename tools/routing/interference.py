"""TPOT of running answers against throughput while prompts of 8,000 tokens arrive: together and split, by chunk size.

    python -m tools.routing.interference [--devices 2] [--prefill 1] [--busy 0.5 0.8] [--chunks 128 256 512 2048]

Chats (200 + 300 tokens, `--chats` a second) run on simulated H200s while long prompts with answers of 8 tokens come at
random. `--busy` is the share of the prefill replicas' time that these prompts take when split; the same requests are
played on as many replicas with both roles. Chunks have a fixed size: there is no TPOT objective that would shrink them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import NamedTuple

from tools.routing.split import printed, ratio

from penstock.core.settings import Role
from penstock.core.slo import Slo
from penstock.router.legs import Split
from penstock.sim.flight import Ask, Flight
from penstock.sim.network import KvLink
from penstock.sim.profile import Profile, load_profile
from penstock.sim.quantiles import Quantiles
from penstock.sim.simulation import Simulation

CHAT, LONG = (200, 300), (8000, 8)  # tokens of prompt and answer


class Point(NamedTuple):
    chunk_tokens: int
    tpot_s: float  # p99 of the chats
    ttft_s: float  # p99 of all
    tokens_per_s: float  # prompts and answers


def asked(chats_per_s: float, longs_per_s: float, seconds: float, seed: int) -> list[Ask]:
    rng, found = Random(seed), []
    for rate, (prompt, output) in ((chats_per_s, CHAT), (longs_per_s, LONG)):
        at_s = rng.expovariate(rate)
        while at_s < seconds:
            found.append(Ask(at_s, prompt, output))
            at_s += rng.expovariate(rate)
    return sorted(found)


def simulate(profile: Profile, roles: Sequence[Role], split: Split, asks: Sequence[Ask], chunk_tokens: int) -> Point:
    tpot_s, ttft_s = Quantiles(), Quantiles()

    def ended(flight: Flight) -> None:
        assert flight.first_s is not None
        assert flight.ended_s is not None
        ttft_s.add(flight.first_s - flight.ask.at_s)
        if flight.ask.output_tokens == CHAT[1]:
            tpot_s.add((flight.ended_s - flight.first_s) / (CHAT[1] - 1))

    sim = Simulation(replace(profile, chunk_tokens=chunk_tokens), roles, kv_link=KvLink(), split=split, ended=ended)
    result = sim.run(asks)
    tokens = sum(one.prompt_tokens + one.output_tokens for one in asks)
    return Point(chunk_tokens, tpot_s.at(0.99) or 0.0, ttft_s.at(0.99) or 0.0, tokens / result.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--prefill", type=int, default=1, help="of them, replicas that only compute prompts")
    parser.add_argument("--busy", type=float, nargs="+", default=[0.5, 0.8])
    parser.add_argument("--chunks", type=int, nargs="+", default=[128, 256, 512, 2048])
    parser.add_argument("--split-chunk", type=int, default=2048)
    parser.add_argument("--chats", type=float, default=10.0, help="a second")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    profile = replace(load_profile("h200-llama8b"), slo=Slo(ttft_s=2.0, tpot_s=None))
    together: tuple[Role, ...] = ("both",) * given.devices
    apart, name = ratio(given.prefill, given.devices), f"{given.prefill}:{given.devices - given.prefill}"
    printed(["busy", "prompts/s", "fleet", "chunk", "tokens/s", "TTFT p99", "TPOT p99 of chats", "over split"])
    print("|--:|--:|---|--:|--:|--:|--:|--:|", flush=True)
    for busy in given.busy:
        longs_per_s = busy * given.prefill / profile.request_work_s(LONG[0], 1)
        asks = asked(given.chats, longs_per_s, given.seconds, given.seed)
        split = simulate(profile, apart, "always", asks, given.split_chunk)
        printed([f"{busy:g}", f"{longs_per_s:.1f}", name, *cells(split, split)])
        for chunk in given.chunks:
            point = simulate(profile, together, "never", asks, chunk)
            printed([f"{busy:g}", f"{longs_per_s:.1f}", "together", *cells(point, split)])


def cells(point: Point, split: Point) -> list[str]:
    times = f"{point.ttft_s:.2f} s", f"{point.tpot_s * 1e3:.1f} ms", f"{point.tpot_s / split.tpot_s:.2f}"
    return [f"{point.chunk_tokens:,}", f"{point.tokens_per_s:,.0f}", *times]


if __name__ == "__main__":
    main()
