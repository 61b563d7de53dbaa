"""Whether a Retry-After holds: clients are refused, come back when they were told, and must be let in.

    python -m tools.drills.refusals [--seconds 40] [--clients 240]

For limits (tokens, requests, slots) always; for load, with far more clients than a replica can serve, nine times of
ten. A client that comes back and is refused once more counts as a promise broken.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import uvloop
from tools.drills.call import ask, post
from tools.drills.stand import MODEL, Stand, stand

REPLICA = ("--max-num-seqs", "8")
CONTEXT = 2048  # which leaves KV for a few dozen requests


@dataclass
class Kept:
    """The tally of one kind of refusal."""

    kind: str
    num_answered: int = 0
    num_refused: int = 0
    num_back: int = 0  # came back as told
    num_again: int = 0  # and were refused again
    reasons: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0  # that anybody was told to wait
    wrong: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        return 1 - self.num_again / self.num_back if self.num_back else 1.0

    @property
    def is_good(self) -> bool:
        least = 0.9 if self.kind == "load" else 1.0
        return self.num_back > 0 and self.share >= least and not self.wrong


async def client(kept: Kept, port: int, key: str, name: int, tokens: int, until: float) -> None:
    turn = 0
    while monotonic() < until:
        prompt = f"client {name} comes for the {turn}th time"
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        request, was_told = post("/v1/completions", body, key), False
        turn += 1
        while monotonic() < until:
            call = await ask(port, request)
            kept.num_back += was_told
            if call.status == 200:
                kept.num_answered += 1
                break
            if call.status != 429 or "retry-after" not in call.headers:
                kept.wrong.append(f"status {call.status}: {call.body[:100]!r}")
                return
            kept.num_refused += 1
            kept.num_again += was_told
            kept.reasons[call.json()["error"]["reason"]] += 1
            wait_s = float(call.headers["retry-after"])
            kept.longest_s = max(kept.longest_s, wait_s)
            was_told = True
            await asyncio.sleep(wait_s)


async def drill(place: Stand, kinds: list[str], seconds: float, num_clients: int) -> list[Kept]:
    limits = {
        "tokens": ("--tokens-per-minute", "60000", "--smooth"),
        "requests": ("--requests-per-minute", "600", "--smooth"),
        "concurrency": ("--concurrency", "4"),
        "load": (),
    }
    keys = {kind: place.tenant(kind, *limits[kind]) for kind in kinds}
    gateway = place.gateway(place.replica(*REPLICA))
    warm = Kept("warm")  # a gateway that has seen nobody leave can only guess how long a queue takes
    until = monotonic() + 3.0
    await asyncio.gather(*(client(warm, gateway.port, keys[kinds[-1]], name, 400, until) for name in range(16)))
    found = []
    for kind in kinds:
        kept = Kept(kind)
        clients, tokens = (num_clients, 400) if kind == "load" else (32, 40)
        until = monotonic() + seconds
        names = range(clients)
        await asyncio.gather(*(client(kept, gateway.port, keys[kind], name, tokens, until) for name in names))
        found.append(kept)
    found[-1].wrong += place.complaints()
    return found


HEAD = (
    f"{'refused for':12} {'answered':>8} {'refused':>8} {'came back':>9} {'again':>6} {'kept':>7} {'longest':>8}  "
    "reasons"
)


def line(kept: Kept) -> str:
    return (
        f"{kept.kind:12} {kept.num_answered:8} {kept.num_refused:8} {kept.num_back:9} {kept.num_again:6} "
        f"{kept.share:7.1%} {kept.longest_s:6.0f} s  {dict(kept.reasons)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--clients", type=int, default=240)
    parser.add_argument("--kinds", default="tokens,requests,concurrency,load")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, stand(Path(directory), context=CONTEXT) as place:
        found = uvloop.run(drill(place, arguments.kinds.split(","), arguments.seconds, arguments.clients))
    print(HEAD)
    for kept in found:
        print(line(kept))
        for what in kept.wrong[:5]:
            print(f"    {what}")
    sys.exit(not all(kept.is_good for kept in found))


if __name__ == "__main__":
    main()
