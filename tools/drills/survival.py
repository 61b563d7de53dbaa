"""Hundreds of streams while one replica is killed, one is stopped for a while and one drains.

    python -m tools.drills.survival [--streams 300] [--tokens 800] [--rounds 3]

Half of the streams are greedy, half have a seed. Every one must say what it says on a quiet day, under one id, with
the right usage and an end; nothing else counts as survived, but an error event where no replica was left.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import uvloop
from tools.drills.call import Call, begin, post
from tools.drills.stand import MODEL, Process, Stand, stand

_GIVE_UP_S = 600.0  # whoever waits for longer waits for ever
_HUNG_S = 5.0  # a gateway takes it for hung after three
REPLICA = ("--max-num-seqs", "512", "--max-open", "2048", "--chunk-tokens", "2048")


@dataclass
class Report:
    num_streams: int
    num_hit: list[int] = field(default_factory=list)  # streams that were open at each misfortune
    wrong: list[str] = field(default_factory=list)  # what was not as on the quiet day, one line per stream
    seconds: float = 0.0
    longest_gap_s: float = 0.0
    median_gap_s: float = 0.0  # of the longest gap in each stream: how long a client's text stood still

    @property
    def num_survived(self) -> int:
        return self.num_streams - len(self.wrong)


def asked(number: int, tokens: int) -> dict[str, Any]:
    sampled = {"temperature": 0.9, "seed": number} if number % 2 else {"temperature": 0}
    return {
        "model": MODEL,
        "prompt": f"stream {number} tells of the quick brown fox",
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        **sampled,
    }


def fault(call: Call, expected: Call) -> str | None:
    if call.status != 200:
        return f"status {call.status}: {call.body[:200]!r}"
    if not call.is_whole:
        return "the connection was cut"
    events = call.events()
    if failed := [event["error"]["message"] for event in events if "error" in event]:
        return f"error event: {failed[0]}"
    if not call.body.endswith(b"data: [DONE]\n\n"):
        return "no [DONE]"
    if len({event["id"] for event in events}) != 1:
        return "more than one id"
    if call.text != expected.text:
        return f"text differs: {call.text[-60:]!r}, not {expected.text[-60:]!r}"
    if any(call.usage[name] != expected.usage[name] for name in ("prompt_tokens", "completion_tokens")):
        return f"usage {call.usage}, not {expected.usage}"
    return None


async def undisturbed(port: int, num_streams: int, tokens: int) -> list[Call]:
    calls = [await begin(port, post("/v1/completions", asked(n, tokens))) for n in range(num_streams)]
    return [await call.ended for call in calls]


Misfortune = Callable[[list[Call]], Coroutine[None, None, list[int]]]  # returns how many streams were open each time


async def drill(port: int, expected: list[Call], tokens: int, misfortune: Misfortune) -> Report:
    began = monotonic()
    calls = [await begin(port, post("/v1/completions", asked(n, tokens))) for n in range(len(expected))]
    report = Report(len(calls))
    happening = asyncio.create_task(misfortune(calls))
    async with asyncio.timeout(_GIVE_UP_S):
        await asyncio.gather(*(call.ended for call in calls))
        report.num_hit = await happening
    for number, (call, quiet) in enumerate(zip(calls, expected, strict=True)):
        if (what := fault(call, quiet)) is not None:
            report.wrong.append(f"stream {number}: {what}")
    report.seconds = monotonic() - began
    gaps_s = [call.longest_gap_s for call in calls]
    report.longest_gap_s, report.median_gap_s = max(gaps_s), median(gaps_s)
    return report


async def all_at(calls: list[Call], event: int) -> None:
    await asyncio.gather(*(call.at_event(event) for call in calls))


def everything(replicas: list[Process], tokens: int) -> Misfortune:
    """The first is killed; the second hangs, and comes back; then the third drains, and the second has it all."""
    killed, hung, drained = replicas

    async def happen(calls: list[Call]) -> list[int]:
        await all_at(calls, tokens // 16)
        counts = [still_open(calls)]
        killed.signal(signal.SIGKILL)
        await all_at(calls, tokens // 8)
        counts.append(still_open(calls))
        hung.signal(signal.SIGSTOP)
        await asyncio.sleep(_HUNG_S)
        hung.signal(signal.SIGCONT)
        await asyncio.sleep(1.0)
        counts.append(still_open(calls))
        await asyncio.to_thread(drained.post, "/v1/penstock/drain")
        return counts

    return happen


def still_open(calls: list[Call]) -> int:
    return sum(not call.ended.done() for call in calls)


async def run(place: Stand, num_streams: int, tokens: int) -> Report:
    replicas = [place.replica(*REPLICA) for _ in range(3)]
    gateway = place.gateway(*replicas)
    expected = await undisturbed(gateway.port, num_streams, tokens)
    report = await drill(gateway.port, expected, tokens, everything(replicas, tokens))
    report.wrong += [f"in a log: {line}" for line in gateway.complaints()]
    for process in (gateway, *replicas):
        process.end()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=800)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    hit_title = "open when killed, stopped, drained"
    print(f"{'round':>5} {'streams':>8} {hit_title:>36} {'survived':>9} {'longest gap':>12} {'median':>8}")
    num_wrong = 0
    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as directory, stand(Path(directory)) as place:
            report = uvloop.run(run(place, arguments.streams, arguments.tokens))
        hit = ", ".join(map(str, report.num_hit))
        print(
            f"{number:5} {report.num_streams:8} {hit:>36} {report.num_survived:9} {report.longest_gap_s:10.1f} s"
            f" {report.median_gap_s:6.1f} s",
            flush=True,
        )
        for line in report.wrong[:5]:
            print(f"      {line}")
        num_wrong += len(report.wrong)
    sys.exit(num_wrong > 0)


if __name__ == "__main__":
    main()
