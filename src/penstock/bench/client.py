"""One streamed completion: what arrived when, and what it says.

While a load is on, chunks are only time-stamped: the client shares its cores with the server. `digest` reads them
afterwards. Any OpenAI-compatible server will do; it must report usage, since tokens cannot be counted from chunks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp
import msgspec

from penstock.bench.workloads import Workload

TIMEOUT = aiohttp.ClientTimeout(total=900)


class RequestFailed(Exception):
    """A request without a usable answer; it is counted, and the load goes on."""


@dataclass(frozen=True)
class Recording:
    sent_s: float
    chunks: list[tuple[float, bytes]]  # (arrival, bytes) as the socket gave them; not aligned to events


@dataclass(frozen=True)
class Answer:
    ttft_s: float
    tpot_s: float | None  # None: a single token has no time between tokens
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class _Choice(msgspec.Struct):
    text: str = ""


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_decoder = msgspec.json.Decoder(_Event)


def request_body(model: str, workload: Workload, prompt: str) -> bytes:
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": workload.output_tokens,
            "temperature": 0,
            "ignore_eos": True,  # everyone generates the same number of tokens
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


def new_session() -> aiohttp.ClientSession:
    """A connection per request, as from many clients: some servers give a thread to each one that stays open."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=TIMEOUT, headers={"content-type": "application/json"})


async def ask(session: aiohttp.ClientSession, url: str, body: bytes) -> Recording:
    """`url` is the server's; RequestFailed if it refuses or breaks off."""
    chunks = []
    sent_s = time.perf_counter()
    try:
        async with session.post(f"{url}/v1/completions", data=body) as response:
            if response.status != 200:
                raise RequestFailed(f"{response.status} {(await response.text())[:300]}")
            async for chunk in response.content.iter_any():
                chunks.append((time.perf_counter(), chunk))
    except (aiohttp.ClientError, TimeoutError) as error:
        raise RequestFailed(repr(error)) from None
    return Recording(sent_s, chunks)


def digest(recording: Recording) -> Answer:
    first_s = last_s = None
    usage = None
    for arrived_s, event in _events(recording):
        if event.error and event.error != b"null":
            raise RequestFailed(bytes(event.error).decode(errors="replace")[:300])
        usage = event.usage or usage
        if any(choice.text for choice in event.choices):
            first_s = arrived_s if first_s is None else first_s
            last_s = arrived_s
    if first_s is None or last_s is None:
        raise RequestFailed("the stream held no text")
    if usage is None:
        raise RequestFailed("the stream held no usage, so its tokens cannot be counted")
    num_tokens = usage.completion_tokens
    details = usage.prompt_tokens_details
    return Answer(
        ttft_s=first_s - recording.sent_s,
        tpot_s=(last_s - first_s) / (num_tokens - 1) if num_tokens > 1 else None,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        output_tokens=num_tokens,
    )


def _events(recording: Recording) -> Iterator[tuple[float, _Event]]:
    """Each event at the arrival of the chunk that completed it. OpenAI's events are one `data:` line each."""
    rest = b""
    for arrived_s, chunk in recording.chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                try:
                    yield arrived_s, _decoder.decode(data)
                except msgspec.MsgspecError as error:
                    raise RequestFailed(f"{error}: {data[:300]!r}") from None
