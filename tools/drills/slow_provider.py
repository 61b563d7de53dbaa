"""A provider that takes its time, and a model of one's own behind it.

    python -m tools.drills.slow_provider [--requests 60]

The provider answers nobody until every client has an answer. Each client must get the whole answer of the next
model in the chain, with a header that says so, its first token within that time and what the next model takes on a
quiet day; what was asked of the provider is given up; and when it is quick again it is the one that answers.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from tests.gateway.provider import Provider, providing
from tests.waiting import eventually
from tools.drills.call import Call, ask, begin, post
from tools.drills.spike import p
from tools.drills.stand import MODEL, PATIENT, Process, Stand, stand

SLOW_AFTER_S = 0.5
_GIVE_UP_S = 600.0  # whoever waits for longer waits for ever
TOKENS = 20
OUTSIDE = "outside"  # the provider's model


@dataclass
class Report:
    num_requests: int
    quiet: list[float] = field(default_factory=list)  # seconds to a first token, of the next model by itself
    slow: list[float] = field(default_factory=list)  # the same, after the provider was waited for
    wrong: list[str] = field(default_factory=list)
    num_given_up: int = 0  # of what was asked of the provider: it had nobody to answer


def asked(model: str, number: int) -> bytes:
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": f"number {number} asks for a tale"}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    return post("/v1/chat/completions", body)


def said(call: Call) -> str:
    return "".join(choice["delta"].get("content") or "" for event in call.events() for choice in event["choices"])


async def together(port: int, model: str, count: int) -> list[Call]:
    calls = [await begin(port, asked(model, number)) for number in range(count)]
    async with asyncio.timeout(_GIVE_UP_S):
        return [await call.ended for call in calls]


async def drill(gateway: Process, provider: Provider, count: int) -> Report:
    report = Report(count)
    quiet = await together(gateway.port, MODEL, count)
    report.quiet = [call.first_s - call.asked_s for call in quiet]
    provider.may_answer.clear()
    slow = await together(gateway.port, OUTSIDE, count)
    report.slow = [call.first_s - call.asked_s for call in slow]
    for number, (call, expected) in enumerate(zip(slow, quiet, strict=True)):
        told = call.headers.get("x-penstock-fallback")
        if call.status != 200 or not call.is_whole or said(call) != said(expected):
            report.wrong.append(f"request {number}: status {call.status}, {call.body[-200:]!r}")
        elif told != f"{OUTSIDE}->{MODEL}; slow":
            report.wrong.append(f"request {number}: x-penstock-fallback is {told!r}")
    provider.may_answer.set()  # and finds that all have left
    await asyncio.to_thread(
        eventually, lambda: (provider.num_left, len(provider.asked)), lambda seen: seen[0] == seen[1]
    )
    report.num_given_up = provider.num_left
    async with asyncio.timeout(_GIVE_UP_S):  # the provider is asked again once it is quick, as this machine lets it be
        while "x-penstock-fallback" in (again := await ask(gateway.port, asked(OUTSIDE, 0))).headers:
            pass
    if said(again) != provider.says:
        report.wrong.append(f"quick again, the provider does not answer: {again.body[-200:]!r}")
    report.wrong += [f"in a log: {line}" for line in gateway.complaints()]
    return report


def chain(place: Stand, replica: Process, provider: Provider) -> Process:
    """A gateway whose outside model falls back to the replica's."""
    models = {
        OUTSIDE: {"replicas": [provider.url], "fallback": [MODEL], "slow_after_s": SLOW_AFTER_S, "dialect": "openai"},
        MODEL: {"replicas": [replica.url]},
    }
    gateway = place.gateway(models=models, **PATIENT)
    eventually(
        lambda: [one["state"] for one in gateway.get("/admin/v1/replicas")["replicas"]],
        lambda states: states == ["ready"] * len(models),
    )
    return gateway


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=60)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as directory,
        stand(Path(directory), context=4096) as place,
        providing(says="from outside") as provider,
    ):
        gateway = chain(place, place.replica(), provider)
        report = uvloop.run(drill(gateway, provider, arguments.requests))
    print(f"{'':18} {'TTFT p50':>9} {'p95':>8} {'most':>8}")
    for name, times in (("the next model", report.quiet), ("after the slow one", report.slow)):
        print(f"{name:18} {p(0.5, times):7.2f} s {p(0.95, times):6.2f} s {max(times):6.2f} s")
    print(f"the provider had nobody to answer for {report.num_given_up} that it had taken")
    print(f"{report.num_requests - len(report.wrong)} of {report.num_requests} answered by it, whole and told so")
    for line in report.wrong[:5]:
        print(f"    {line}")
    sys.exit(bool(report.wrong))


if __name__ == "__main__":
    main()
