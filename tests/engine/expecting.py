"""What tests of the engine wait for, and what they expect."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import psutil

from penstock.core.clock import MonotonicClock
from penstock.core.request import Request, TokenEvent
from penstock.engine.client import EngineClient, EngineState
from penstock.engine.fake import fake_token
from penstock.engine.token_stream import TokenStream
from tests.engine.fake_engine import VOCAB_SIZE, launcher
from tests.patience import Patience


@contextlib.asynccontextmanager
async def engine(**options: object) -> AsyncIterator[EngineClient]:
    """A client of a real process around the fake runner; it must not miss what it is told to do for long."""
    client = EngineClient(launcher(**options), MonotonicClock())
    try:
        await asyncio.wait_for(client.start(), 60)
        yield client
    finally:
        await client.stop()


async def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> float:
    """Seconds until the condition held."""
    patience = Patience(within_s)
    while not condition():
        patience.look()
        await asyncio.sleep(0.002)
    return patience.spent_s


async def read(stream: TokenStream, *request_ids: str) -> dict[str, list[TokenEvent]]:
    """Everything that comes of these requests until all of them have ended."""
    events: dict[str, list[TokenEvent]] = {request_id: [] for request_id in request_ids}
    with stream:
        while any(not got or got[-1].finish is None for got in events.values()):
            for event in await asyncio.wait_for(stream.next(), 60):
                events[event.request_id].append(event)
    return events


async def tokens_of(client: EngineClient, request: Request) -> list[int]:
    events = await read(client.open([request]), request.id)
    return [token_id for event in events[request.id] for token_id in event.token_ids]


def expected(prompt: list[int], count: int, *, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(fake_token(tokens, vocab_size, seed=seed))
    return tokens[len(prompt) :]


def engine_process() -> psutil.Process:
    """The one engine that this process has started."""
    (process,) = (child for child in psutil.Process().children() if any("engine" in word for word in child.cmdline()))
    return process


def is_ready(client: EngineClient) -> bool:
    return client.state is EngineState.READY
