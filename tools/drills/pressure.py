"""More than the KV cache holds: prompts near the context's end, many at once, and decodes that fill the last block.

    python -m tools.drills.pressure [--long 24] [--decodes 96]

One replica, whose cache has room for two whole contexts. First long prompts come all together, with short chats beside
them and prompts that no cache has room for; then so many streams decode that the cache overflows again and again. Every
stream must say what it says on a quiet day, what cannot be is refused with a reason, the process takes no more memory
than it had, and afterwards not a block is held. Who must wait waits; who is in the way is preempted; a gateway lets no
more than two caches' worth of long prompts wait, and says so, but never refuses a short chat for their sake.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import uvloop
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from tests.waiting import eventually
from tools.drills.call import Call, begin, post
from tools.drills.stand import MODEL, PATIENT, Process, Stand, stand
from tools.drills.survival import fault

CONTEXT = 8192
CACHE = 2 * CONTEXT  # what an engine on a CPU takes by itself
REPLICA = ("--max-num-seqs", "128", "--max-open", "128", "--chunk-tokens", "1024")
MAX_BYTES = 128 << 20  # more than on the quiet day: what a step takes and what clients have not read, no KV cache
CHAT = 30  # tokens of a short prompt
QUIET = 8  # streams at a time, on a quiet day
LATE = 150  # requests that come when all places are taken
_GIVE_UP_S = 600.0  # whoever waits for longer waits for ever
_FLUSH_STEPS = 64  # after so many the step log reaches its file
_FIRST_WORD, _LAST_WORD = 10, 500  # ids of plain tokens


@dataclass
class Report:
    num_streams: int
    wrong: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)  # of prompts that no cache has room for: status and code
    shed: list[str] = field(default_factory=list)  # reasons that a gateway gave to those it did not let wait
    shed_chats: list[str] = field(default_factory=list)  # and those of them that it gave to short ones
    turned_away: list[str] = field(default_factory=list)  # of those that came when all places were taken: the same
    fullest: float = 0.0  # the cache's share that the sequences of one step read, at most
    num_preempted: int = 0
    num_restarts: int = 0
    left: dict[str, float] = field(default_factory=dict)  # what is not as in an idle replica
    more_bytes: int = 0  # of the replica and its engine, beyond what they had


def asked(number: int, prompt_tokens: int, output: int) -> dict[str, Any]:
    """A prompt of its own from the first token on; every other one is sampled."""
    rng = random.Random(number)
    sampled = {"temperature": 0.9, "seed": number} if number % 2 else {"temperature": 0}
    return {
        "model": MODEL,
        "prompt": [rng.randrange(_FIRST_WORD, _LAST_WORD) for _ in range(prompt_tokens)],
        "max_tokens": output,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        **sampled,
    }


def long_ones(count: int) -> list[dict[str, Any]]:
    """Returns requests of nearly a context each, with a short one after every other."""
    found = []
    for number in range(count):
        found.append(asked(number, CONTEXT - 200 - number, 60))
        if number % 2:
            found.append(asked(1000 + number, CHAT, 40))
    return found


def decodes(count: int) -> list[dict[str, Any]]:
    """Short prompts and long answers: they all fit when they come, and overflow it as they go."""
    return [asked(2000 + number, 20, 400 + number) for number in range(count)]


def too_long(count: int) -> list[dict[str, Any]]:
    return [asked(3000 + number, CONTEXT + 1 + number, 10) for number in range(count)]


def refusal(call: Call) -> str:
    return f"{call.status} {call.json()['error']['code']}" + (" with Retry-After" * ("retry-after" in call.headers))


async def in_turns(port: int, bodies: Sequence[dict[str, Any]], at_once: int = QUIET) -> list[Call]:
    places = asyncio.Semaphore(at_once)

    async def one(body: dict[str, Any]) -> Call:
        async with places:
            return await (await begin(port, post("/v1/completions", body))).ended

    return await asyncio.gather(*map(one, bodies))


class UnderPressure:
    """A replica that keeps a log of its steps, and what it says on a quiet day."""

    def __init__(self, place: Stand) -> None:
        self._log = place.directory / "steps.csv"
        self.replica = place.replica(*REPLICA, "--step-log", str(self._log))
        self._quiet: dict[str, Call] = {}
        eventually(self.replica.is_ready)

    async def quiet_answers(self, bodies: Sequence[dict[str, Any]], at_once: int) -> list[Call]:
        keys = [json.dumps(body) for body in bodies]
        new = [(key, body) for key, body in zip(keys, bodies, strict=True) if key not in self._quiet]
        answers = await in_turns(self.replica.port, [body for _, body in new], at_once)
        self._quiet |= {key: answer for (key, _), answer in zip(new, answers, strict=True)}
        return [self._quiet[key] for key in keys]

    async def steps(self) -> list[int]:
        """The tokens of context that the decodes of each step read, of all steps so far."""
        await in_turns(self.replica.port, [asked(5000, 10, _FLUSH_STEPS + 6)])  # by then they are in the file
        lines = (await asyncio.to_thread(self._log.read_text)).rpartition("\n")[0].splitlines()
        column = lines[1].split(",").index("decode_context")
        return [int(line.split(",")[column]) for line in lines[2:]]


async def drill(
    door: Process, under: UnderPressure, bodies: Sequence[dict[str, Any]], at_once: int = QUIET, num_late: int = 0
) -> Report:
    """`door`: the replica, or a gateway in front of it. `num_late` more come when it is full."""
    replica = under.replica
    expected = await under.quiet_answers(bodies, at_once)
    await asyncio.to_thread(eventually, lambda: held(replica), lambda found: not found)
    if door is not replica:
        await asyncio.to_thread(eventually, door.known_work, lambda found: not any(found))
    report = Report(len(bodies))
    num_steps = len(await under.steps())
    before, memory_bytes = metrics(replica), memory(replica)
    # The engine stands still while they come, so that they are there together however slow the client is.
    with replica.engine_stopped():
        calls = [await begin(door.port, post("/v1/completions", body)) for body in bodies]
        impossible = [await begin(door.port, post("/v1/completions", body)) for body in too_long(4)]
        await all_there(door, calls + impossible)
        late = [await begin(door.port, post("/v1/completions", asked(4000 + n, 10, 60))) for n in range(num_late)]
        await all_there(door, calls + impossible + late)
    async with asyncio.timeout(_GIVE_UP_S):
        while not all(call.ended.done() for call in calls + impossible + late):
            report.more_bytes = max(report.more_bytes, memory(replica) - memory_bytes)
            await asyncio.sleep(0.05)
    for number, (call, quiet) in enumerate(zip(calls, expected, strict=True)):
        if call.status == 429 and "retry-after" in call.headers and (reason := call.json()["error"].get("reason")):
            report.shed.append(reason)
            if len(bodies[number]["prompt"]) <= CHAT:
                report.shed_chats.append(reason)
        elif (what := fault(call, quiet)) is not None:
            report.wrong.append(f"stream {number}: {what}")
    report.turned_away = [refusal(call) for call in late if call.status != 200]
    report.refusals = [f"{call.status} {call.json()['error']['code']}" for call in impossible]
    await asyncio.to_thread(eventually, lambda: held(replica), lambda found: not found)
    after = metrics(replica)
    report.left = held(replica)
    report.fullest = max((await under.steps())[num_steps:]) / CACHE
    report.num_preempted = round(after["penstock_preemptions_total"] - before["penstock_preemptions_total"])
    report.num_restarts = round(after["penstock_engine_restarts_total"] - before["penstock_engine_restarts_total"])
    report.wrong += [f"in a log: {line}" for line in replica.complaints()]
    return report


async def all_there(door: Process, calls: Sequence[Call]) -> None:
    """Every one is refused, or at a replica, or waits at the gateway."""
    names = {"penstock_requests_open", "penstock_gateway_requests_open", "penstock_gateway_queue_length"}
    while True:
        num_held = sum(one.value for one in await asyncio.to_thread(samples, door) if one.name in names)
        if num_held + sum(call.ended.done() for call in calls) == len(calls):
            return
        await asyncio.sleep(0.01)


def samples(process: Process) -> list[Sample]:
    with urllib.request.urlopen(f"{process.url}/metrics", timeout=60) as answer:
        return [one for family in text_string_to_metric_families(answer.read().decode()) for one in family.samples]


def metrics(replica: Process) -> dict[str, float]:
    """Those without labels, by name."""
    return {sample.name: sample.value for sample in samples(replica) if not sample.labels}


def held(replica: Process) -> dict[str, float]:
    """Returns what a replica that works for nobody has none of."""
    names = ("requests_open", "sequences_running", "sequences_waiting", "kv_usage_ratio")
    found = metrics(replica)
    return {name: found[f"penstock_{name}"] for name in names if found[f"penstock_{name}"]}


def memory(replica: Process) -> int:
    server = psutil.Process(replica.pid)
    return sum(int(one.memory_info().rss) for one in (server, *server.children(recursive=True)))


def show(name: str, report: Report) -> None:
    num_refused = len(report.refusals) + len(report.turned_away) + len(report.shed)
    num_right = report.num_streams - len(report.wrong) - len(report.shed)
    print(
        f"{name:8} {report.num_streams:8} {num_right:6} {report.fullest:8.0%} "
        f"{report.num_preempted:10} {num_refused:8} {report.more_bytes / 2**20:7.0f} MiB "
        f"{'nothing' if not report.left else report.left}",
        flush=True,
    )
    for line in report.wrong[:5]:
        print(f"    {line}")


async def run(place: Stand, num_long: int, num_decodes: int) -> bool:
    under = await asyncio.to_thread(UnderPressure, place)
    replica = under.replica
    gateway = place.gateway(replica, **PATIENT)
    print(f"{'':8} {'streams':>8} {'right':>6} {'fullest':>8} {'preempted':>10} {'refused':>8} {'memory':>11} left")
    found = []
    for name, door, bodies, num_late in (
        ("long", replica, long_ones(num_long), 0),
        ("decodes", replica, decodes(num_decodes), LATE),
        ("at door", gateway, long_ones(num_long), 0),
    ):
        found.append(await drill(door, under, bodies, num_late=num_late))
        show(name, found[-1])
    return not any(
        report.wrong or report.left or report.shed_chats or report.num_restarts or report.more_bytes > MAX_BYTES
        for report in found
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", type=int, default=24, help="prompts of nearly a context, at once")
    parser.add_argument("--decodes", type=int, default=96, help="streams that outgrow the cache together")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, stand(Path(directory), context=CONTEXT) as place:
        sys.exit(not uvloop.run(run(place, arguments.long, arguments.decodes)))


if __name__ == "__main__":
    main()
