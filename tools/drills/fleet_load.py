"""Clients of a fleet in a drill: each asks again when it is answered, and each answer is compared with a quiet one."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from tools.drills.call import Call, ask, begin, post
from tools.drills.fleet_stand import POOL

_GIVE_UP_S = 300.0  # of a client: beyond every wait that a fleet may ask for
_PATH = "/v1/completions"
_CODE = "error"


def questions(tokens: int) -> dict[str, dict[str, Any]]:
    """Requests by name: streamed and not, greedy and by chance, several choices, a guided answer."""
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"stream": True, "temperature": 0},
        "seeded": {"stream": True, "temperature": 0.9, "seed": 7},
        "two choices": {"stream": True, "temperature": 0.9, "seed": 8, "n": 2},
        "guided": {"stream": True, "temperature": 0.9, "seed": 9, "guided_regex": f"[a-z ]{{{tokens // 2}}}"},
        "whole, greedy": {"temperature": 0},
        "whole, seeded": {"temperature": 0.9, "seed": 11},
    }
    found = {}
    for name, options in kinds.items():
        plain: dict[str, Any] = {"model": POOL, "prompt": f"{name}: the quick brown fox", "max_tokens": tokens}
        ending = {"ignore_eos": True} if "guided_regex" not in options else {"max_tokens": 2 * tokens}
        usage = {"stream_options": {"include_usage": True}} if options.get("stream") else {}
        found[name] = plain | ending | usage | options
    return found


def answer_of(call: Call) -> tuple[dict[int, str], int]:
    """Text of each choice, and the number of tokens."""
    events = call.events() if b"event-stream" in call.headers.get("content-type", "").encode() else [call.json()]
    texts: Counter[int] | dict[int, str] = {}
    for event in events:
        for choice in event.get("choices", ()):
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return dict(texts), call.usage["completion_tokens"]


def fault(call: Call, expected: tuple[dict[int, str], int]) -> str | None:
    """Returns what is wrong with an answer that was not refused; None: nothing."""
    if call.status != 200:
        return f"status {call.status}: {call.body[:200]!r}"
    if not call.is_whole:
        return f"the connection was cut after {call.num_events} events"
    if b'"error"' in call.body:
        return f"an error event: {call.body[-300:]!r}"
    if b"event-stream" in call.headers.get("content-type", "").encode() and not call.body.endswith(b"[DONE]\n\n"):
        return "no [DONE]"
    if (found := answer_of(call)) != expected:
        return f"not the quiet answer: {found[1]} tokens, {expected[1]} expected; {str(found[0])[-60:]!r}"
    return None


def is_refusal(call: Call) -> bool:
    """Whether it is one that names its reason and a time to come back."""
    if call.status not in (429, 503) or "retry-after" not in call.headers:
        return False
    return bool(json.loads(call.body).get(_CODE, {}).get("code"))


@dataclass
class Tally:
    num_whole: int = 0
    num_refused: int = 0
    longest_gap_s: float = 0.0
    longest_wait_s: float = 0.0  # for the first byte
    wrong: list[str] = field(default_factory=list)


class CheckedLoad:
    def __init__(self, port: int, tokens: int, host: str = "127.0.0.1") -> None:
        self._port = port
        self._host = host
        self._asked = {name: post(_PATH, body) for name, body in questions(tokens).items()}
        self._names = itertools.cycle(self._asked)
        self._expected: dict[str, tuple[dict[int, str], int]] = {}
        self._clients: list[asyncio.Task[None]] = []
        self._open: set[Call] = set()
        self._num_wanted = 0
        self.tally = Tally()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def open_calls(self) -> frozenset[Call]:
        return frozenset(self._open)

    async def learn(self) -> None:
        """Asks everything once, undisturbed."""
        for name, request in self._asked.items():
            call = await ask(self._port, request, _GIVE_UP_S, self._host)
            assert call.status == 200, call.body
            self._expected[name] = answer_of(call)

    def resize(self, num_clients: int) -> None:
        """More clients begin at once; those that are too many end with their answer."""
        self._clients = [one for one in self._clients if not one.done()]
        self._num_wanted = num_clients
        for number in range(len(self._clients), num_clients):
            self._clients.append(asyncio.create_task(self._ask_again(number)))

    def move(self, host: str) -> None:
        """Requests from now on go to this address."""
        self._host = host

    def take_tally(self) -> Tally:
        """Returns what was counted since the last call."""
        found, self.tally = self.tally, Tally()
        return found

    async def stop(self) -> None:
        self.resize(0)
        await asyncio.gather(*self._clients)

    async def _ask_again(self, number: int) -> None:
        while number < self._num_wanted:
            name = next(self._names)
            try:
                call = await begin(self._port, self._asked[name], self._host)
                self._open.add(call)
                async with asyncio.timeout(_GIVE_UP_S):
                    await call.ended
            except (OSError, TimeoutError) as error:
                self.tally.wrong.append(f"{name}: {type(error).__name__} {error}")
                await asyncio.sleep(0.5)
                continue
            finally:
                self._open.discard(call)
            self._count(name, call)
            if call.status != 200:
                await asyncio.sleep(float(call.headers.get("retry-after", 1)))

    def _count(self, name: str, call: Call) -> None:
        tally = self.tally
        if is_refusal(call):
            tally.num_refused += 1
        elif (what := fault(call, self._expected[name])) is not None:
            tally.wrong.append(f"{name}, after {monotonic() - call.asked_s:.1f} s: {what}")
        else:
            tally.num_whole += 1
            tally.longest_gap_s = max(tally.longest_gap_s, call.longest_gap_s)
            tally.longest_wait_s = max(tally.longest_wait_s, call.first_s - call.asked_s)
