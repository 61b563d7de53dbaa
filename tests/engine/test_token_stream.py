"""What a reader gets of its requests, however slow it is."""

from __future__ import annotations

import asyncio

import pytest

from penstock.core.errors import EngineFailed, EngineUnavailable, PenstockError, UnsupportedParameter
from penstock.core.request import FinishReason, TokenEvent
from penstock.engine.token_stream import TokenStream

TOKENS = [TokenEvent("a", [1]), TokenEvent("a", [2])]
FAILED = TokenEvent("a", finish=FinishReason.ERROR, error="no answer can follow it")
REFUSED = TokenEvent("a", finish=FinishReason.ERROR, error="too much", error_code=UnsupportedParameter.code)


def all_of(stream: TokenStream) -> tuple[list[TokenEvent], PenstockError]:
    async def read() -> tuple[list[TokenEvent], PenstockError]:
        events: list[TokenEvent] = []
        while True:
            try:
                events += await stream.next()
            except PenstockError as error:
                return events, error

    return asyncio.run(read())


def stream_of(*events: TokenEvent) -> TokenStream:
    stream = TokenStream(lambda _: None, ["a"])
    for event in events:
        stream.push(event)
    return stream


@pytest.mark.parametrize(("event", "kind"), [(FAILED, EngineFailed), (REFUSED, UnsupportedParameter)])
def test_tokens_that_came_before_an_error_are_read_before_it(event: TokenEvent, kind: type[PenstockError]) -> None:
    events, error = all_of(stream_of(*TOKENS, event, TokenEvent("a", [3])))
    assert events == TOKENS
    assert (type(error), error.message) == (kind, event.error)


def test_an_engine_that_dies_loses_no_tokens_that_it_has_told() -> None:
    stream = stream_of(*TOKENS)
    stream.fail(EngineUnavailable("it died", retry_after_s=1.0))
    stream.push(TokenEvent("a", [3]))
    events, error = all_of(stream)
    assert events == TOKENS
    assert isinstance(error, EngineUnavailable)
