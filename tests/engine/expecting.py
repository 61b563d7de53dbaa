"""Waits and expectations of the engine's tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import psutil

from penstock.core.clock import MonotonicClock
from penstock.core.request import Request, TokenEvent
from penstock.engine.client import EngineClient, EngineState
from penstock.engine.fake import FakeState
from penstock.engine.messages import StepReport
from penstock.engine.token_stream import TokenStream
from tests.engine.fake_engine import VOCAB_SIZE, launcher
from tests.waiting import GIVE_UP_S


async def no_pause(seconds: float) -> None:
    """Takes the place of the pause before a process that died is started again."""


@contextlib.asynccontextmanager
async def engine(
    *, on_report: Callable[[StepReport], None] = lambda _: None, **options: object
) -> AsyncIterator[EngineClient]:
    """A client of a real process around the fake runner, which is started again at once where it dies."""
    client = EngineClient(launcher(**options), MonotonicClock(), on_report=on_report, sleep=no_pause)
    try:
        await asyncio.wait_for(client.start(), GIVE_UP_S)
        yield client
    finally:
        await client.stop()


async def read(stream: TokenStream, *request_ids: str) -> dict[str, list[TokenEvent]]:
    """Everything that comes of these requests until all of them have ended."""
    events: dict[str, list[TokenEvent]] = {request_id: [] for request_id in request_ids}
    with stream:
        while any(not got or got[-1].finish is None for got in events.values()):
            for event in await asyncio.wait_for(stream.next(), GIVE_UP_S):
                events[event.request_id].append(event)
    return events


async def tokens_of(client: EngineClient, request: Request) -> list[int]:
    events = await read(client.open([request]), request.id)
    return [token_id for event in events[request.id] for token_id in event.token_ids]


def expected(prompt: list[int], count: int, *, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> list[int]:
    """Returns what the fake model says after this prompt."""
    state, tokens = FakeState.of(prompt, seed=seed), list[int]()
    for _ in range(count):
        tokens.append(state.token(vocab_size))
        state = state.after(tokens[-1:])
    return tokens


def engine_process(client: EngineClient) -> psutil.Process:
    """The process that this client started last."""
    assert client._process is not None
    return psutil.Process(client._process.pid)


def is_ready(client: EngineClient) -> bool:
    return client.state is EngineState.READY
