"""Events of a response: their order and numbers, and that they add up to the response that ends them."""

import json
from typing import Any

from openai.types.responses import Response

from penstock.api.openai import ScoredToken
from penstock.api.responses import ResponseEvents, ResponseHead, Usage, parse_responses
from penstock.core.errors import EngineFailed, InvalidRequest, Overloaded, PenstockError

HEAD = ResponseHead("0a", 1_700_000_000)


def new(**body: Any) -> ResponseEvents:
    return ResponseEvents(HEAD, parse_responses(json.dumps({"model": "m", "input": "hello", **body}).encode()))


def read(frames: list[bytes]) -> list[dict[str, Any]]:
    """The data of events whose names are their types."""
    found = []
    for frame in frames:
        name, data = frame.removesuffix(b"\n\n").split(b"\n")
        found.append(json.loads(data.removeprefix(b"data: ")))
        assert name == b"event: " + found[-1]["type"].encode()
    return found


def types(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_every_event_comes_in_order_with_a_number_of_its_own() -> None:
    events = new()
    said = read(
        [
            *events.opening(),
            *events.reasoning("Hm"),
            *events.reasoning("m."),
            *events.text("Let me "),
            *events.text("look."),
            *events.call("call_1", "f"),
            *events.arguments('{"a"'),
            *events.arguments(":1}"),
            *events.end_item(),
            *events.finish(Usage.of(5, 9, 2, 3)),
        ]
    )
    text = ["content_part.added", "output_text.delta", "output_text.delta", "output_text.done", "content_part.done"]
    call = [f"function_call_arguments.{what}" for what in ("delta", "delta", "done")]
    items = [[one.replace("output_text", "reasoning_text") for one in text], text, call]
    wanted = [one for item in items for one in ("output_item.added", *item, "output_item.done")]
    assert types(said) == ["created", "in_progress", *wanted, "completed"]
    assert [event["sequence_number"] for event in said] == list(range(len(said)))
    done = [event["item"] for event in said if event["type"] == "response.output_item.done"]
    last = said[-1]["response"]
    assert last["output"] == done
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call"]
    assert {item["status"] for item in done} == {"completed"}
    assert done[0]["content"] == [{"type": "reasoning_text", "text": "Hmm."}]
    assert done[1]["content"][0]["text"] == "Let me look."
    assert (done[2]["call_id"], done[2]["name"], done[2]["arguments"]) == ("call_1", "f", '{"a":1}')
    assert [event["output_index"] for event in said if "output_index" in event] == [0] * 7 + [1] * 7 + [2] * 5
    assert json.loads(events.whole) == last


def test_a_response_is_one_that_the_official_client_knows() -> None:
    function = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
    events = new(tools=[function], metadata={"k": "v"}, instructions="I", temperature=0.5)
    events.text("Yes.", [ScoredToken("Yes.", b"Yes.", -0.5, [ScoredToken("No.", b"No.", -1.0)])])
    events.finish(Usage.of(3, 1))
    found = Response.model_validate_json(events.whole, strict=True)
    assert (found.id, found.status, found.output_text) == ("resp_0a", "completed", "Yes.")
    assert (found.temperature, found.instructions, found.metadata) == (0.5, "I", {"k": "v"})
    assert found.usage is not None
    assert found.usage.total_tokens == 4
    scores = json.loads(events.whole)["output"][0]["content"][0]["logprobs"]
    assert [(one["token"], [top["token"] for top in one["top_logprobs"]]) for one in scores] == [("Yes.", ["No."])]


def test_an_answer_that_was_cut_is_incomplete_and_says_why() -> None:
    events = new()
    last = read([*events.text("On and"), *events.finish(Usage.of(1, 2), incomplete="max_output_tokens")])[-1]
    assert last["type"] == "response.incomplete"
    found = last["response"]
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert found["output"][0]["status"] == "incomplete"


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    events = new()
    said = read(events.finish(Usage.of(1, 1)))
    assert said[-1]["response"]["output"][0]["content"][0]["text"] == ""
    assert types(said)[0] == "output_item.added"


def test_one_that_fails_says_so_with_what_there_was_of_it() -> None:
    def failed(error: PenstockError) -> dict[str, Any]:
        events = new()
        said = read([*events.opening(), *events.text("On"), *events.fail(error)])
        assert [event["sequence_number"] for event in said] == list(range(len(said)))
        assert said[-1]["type"] == "response.failed"
        found: dict[str, Any] = said[-1]["response"]
        return found

    found = failed(EngineFailed("it died"))
    assert (found["status"], found["error"]) == (
        "failed",
        {"code": "server_error", "message": "engine_failed: it died"},
    )
    assert (found["output"][0]["status"], found["output"][0]["content"][0]["text"]) == ("incomplete", "On")
    assert failed(InvalidRequest("no"))["error"]["code"] == "invalid_prompt"
    assert failed(Overloaded("no"))["error"]["code"] == "rate_limit_exceeded"
