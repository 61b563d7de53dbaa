"""Answers, as the official client's own types read them."""

import json

from anthropic.types import (
    Message,
    MessageTokensCount,
    RawContentBlockDeltaEvent,
    RawContentBlockStartEvent,
    RawContentBlockStopEvent,
    RawMessageDeltaEvent,
    RawMessageStartEvent,
    RawMessageStopEvent,
    TextDelta,
)
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.anthropic import MessageHead, Stop, Usage, events, message, token_count
from penstock.api.anthropic.responses import text_block

HEAD = MessageHead("msg_1", "m")
USAGE = Usage.of(10, 3, cached_tokens=4)


def split(frame: bytes) -> tuple[str, str]:
    """The name and the data of one event."""
    name, data, *rest = frame.decode().split("\n")
    assert rest == ["", ""]
    name, data = name.removeprefix("event: "), data.removeprefix("data: ")
    assert json.loads(data)["type"] == name
    return name, data


def test_a_whole_message_is_what_the_client_expects() -> None:
    found = Message.model_validate_json(message(HEAD, [text_block("hello")], Stop("stop_sequence", "END"), USAGE))
    assert (found.id, found.type, found.role, found.model) == ("msg_1", "message", "assistant", "m")
    assert [block.model_dump(include={"type", "text"}) for block in found.content] == [
        {"type": "text", "text": "hello"}
    ]
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", "END")


def test_what_was_read_from_the_cache_is_counted_apart() -> None:
    assert (USAGE.input_tokens, USAGE.cache_read_input_tokens, USAGE.output_tokens) == (6, 4, 3)


def test_a_message_begins_empty_in_a_block_of_text() -> None:
    (begun, message_data), (block, block_data), (ping, _) = map(split, events.start(HEAD, USAGE))
    assert (begun, block, ping) == ("message_start", "content_block_start", "ping")
    start = RawMessageStartEvent.model_validate_json(message_data).message
    assert (start.content, start.stop_reason, start.stop_sequence) == ([], None, None)
    assert RawContentBlockStartEvent.model_validate_json(block_data).content_block.type == "text"


@given(st.text())
def test_any_text_travels_in_one_event(text: str) -> None:
    _, data = split(events.text(text))
    delta = RawContentBlockDeltaEvent.model_validate_json(data).delta
    assert isinstance(delta, TextDelta)
    assert delta.text == text


def test_a_message_ends_with_its_reason_and_its_counts() -> None:
    (_, block), (_, delta), (_, stop) = map(split, events.end(Stop("max_tokens"), USAGE))
    assert RawContentBlockStopEvent.model_validate_json(block).index == 0
    found = RawMessageDeltaEvent.model_validate_json(delta)
    assert (found.delta.stop_reason, found.delta.stop_sequence) == ("max_tokens", None)
    assert (found.usage.input_tokens, found.usage.cache_read_input_tokens, found.usage.output_tokens) == (6, 4, 3)
    assert RawMessageStopEvent.model_validate_json(stop).type == "message_stop"


def test_a_count_is_what_the_client_expects() -> None:
    assert MessageTokensCount.model_validate_json(token_count(12)).input_tokens == 12
