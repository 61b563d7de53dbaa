import json

from penstock.api import sse
from penstock.api.errors import ANTHROPIC
from penstock.core.errors import EngineFailed


def test_an_event_is_one_data_line_and_a_blank_one() -> None:
    assert sse.event(b'{"a":1}') == b'data: {"a":1}\n\n'


def test_an_error_event_holds_the_same_body_as_an_error_response() -> None:
    event = sse.error_event(EngineFailed("the engine\ndied"))
    assert event.startswith(b"data: ")
    assert event.count(b"\n") == 2
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "engine_failed"


def test_a_named_event_says_its_name_first() -> None:
    assert sse.event(b"{}", b"ping") == b"event: ping\ndata: {}\n\n"


def test_an_error_event_for_anthropics_clients_is_named() -> None:
    event = sse.error_event(EngineFailed("died"), "r1", ANTHROPIC)
    name, data = event.decode().splitlines()[:2]
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["request_id"] == "r1"


def test_the_end_is_a_frame_of_its_own() -> None:
    assert sse.DONE == b"data: [DONE]\n\n"
