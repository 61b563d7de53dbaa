"""What an application does with the Responses API of OpenAI's official client, at one replica."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from penstock.api.relay import StreamRecord
from penstock.engine.client import EngineState
from tests.engine.expecting import no_pause
from tests.server.relaying import ask, block_ends, carry_on, events
from tests.server.replica import NAME, Replica, serving
from tests.waiting import eventually

RESPONSES = "/v1/responses"
CACHED = re.compile(rb'"cached_tokens":\d+')
QUESTION: Any = {"role": "user", "content": "What is it?"}
GREEDY: Any = {"model": NAME, "temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "web_search"},
    {"type": "function", "name": "get_weather", "description": "Of a city", "parameters": SCHEMA, "strict": True},
]


def create(replica: Replica, asked: Any = "What is it?", **options: Any) -> Response:
    answer: Response = replica.openai.responses.create(input=asked, **GREEDY | {"max_output_tokens": 12} | options)
    return answer


def streamed(replica: Replica, **options: Any) -> list[Any]:
    asked = GREEDY | {"input": "What is it?", "max_output_tokens": 12, "stream": True} | options
    return list(replica.openai.responses.create(**asked))


def check_carried_on(replica: Replica, whole: bytes, end: int, body: bytes) -> None:
    record = StreamRecord()
    record.append(whole[:end])
    rest = carry_on(record, (replica.host, replica.port), RESPONSES, body)
    found, wanted = whole[:end] + rest, whole
    if b'"units":[]' in (record.envelope(body) or b""):  # with no token known, the prompt was found in the cache
        found, wanted = (CACHED.sub(b"", stream) for stream in (found, wanted))
    assert events(found) == events(wanted)


def test_a_question_is_answered(replica: Replica) -> None:
    answer = create(replica, instructions="Be brief.", metadata={"k": "v"})
    asked = [{"role": "system", "content": "Be brief."}, QUESTION]
    assert answer.output_text == replica.answer(asked, 12)
    assert (answer.object, answer.model, answer.metadata) == ("response", NAME, {"k": "v"})
    assert (answer.status, answer.error) == ("incomplete", None)
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.input_tokens == len(replica.prompt_ids(asked))
    assert answer.usage.output_tokens == 12


def test_an_answer_that_comes_to_its_end_is_complete(replica: Replica) -> None:
    answer = create(replica, max_output_tokens=1500)
    assert answer.output_text == replica.answer([QUESTION], 1500)
    assert (answer.status, answer.incomplete_details) == ("completed", None)


def test_a_conversation_goes_on_with_the_output_as_it_was_received(replica: Replica) -> None:
    first = create(replica, [QUESTION])
    second = create(replica, [QUESTION, *first.output, QUESTION])
    said = {"role": "assistant", "content": first.output_text}
    assert second.output_text == replica.answer([QUESTION, said, QUESTION], 12)


def test_a_stream_is_the_response_in_pieces(replica: Replica) -> None:
    whole, found = create(replica), streamed(replica)
    assert [event.sequence_number for event in found] == list(range(len(found)))
    assert "".join(event.delta for event in found if event.type == "response.output_text.delta") == whole.output_text
    assert [event.type for event in found[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    last = found[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text
    assert last.response.usage.output_tokens == 12
    assert len({event.response.id for event in found if hasattr(event, "response")}) == 1


def test_the_clients_own_stream_adds_the_events_up(replica: Replica) -> None:
    said = replica.answer([QUESTION], 12)
    with replica.openai.responses.stream(input="What is it?", extra_body={"stop": said[8:]}, **GREEDY) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.output_text == snapshots[-1] == said[:8]


def test_a_stream_whose_engine_dies_ends_with_a_response_that_failed() -> None:
    with serving(step_s=0.01, sleep=no_pause) as replica:
        asked = GREEDY | {"input": "What is it?", "max_output_tokens": 1000, "stream": True}
        stream = iter(replica.openai.responses.create(**asked))
        seen = [next(stream) for _ in range(8)]
        replica.kill_engine()
        seen += stream
        eventually(lambda: replica.engine.state, lambda state: state is EngineState.READY)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    last = seen[-1]
    assert (last.type, last.response.status, last.response.error.code) == (
        "response.failed",
        "failed",
        "server_error",
    )
    deltas = [event.delta for event in seen if event.type == "response.output_text.delta"]
    assert last.response.output_text == "".join(deltas)


def test_log_probabilities_are_told_where_they_are_asked_for(replica: Replica) -> None:
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    content = create(replica, **asked).output[0].content[0]  # type: ignore[union-attr]
    scores = content.logprobs  # type: ignore[union-attr]
    assert scores is not None
    assert len(scores) == 12
    assert {len(score.top_logprobs) for score in scores} == {2}
    found = streamed(replica, **asked)
    deltas = [score for event in found if event.type == "response.output_text.delta" for score in event.logprobs]
    assert [score.logprob for score in deltas] == [score.logprob for score in scores]


@pytest.mark.parametrize("field", ["previous_response_id", "store", "background"])
def test_what_needs_a_store_is_refused_by_a_replica(replica: Replica, field: str) -> None:
    with pytest.raises(openai.BadRequestError, match="gateway") as refused:
        create(replica, **{field: "resp_1" if field.startswith("previous") else True})
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", field)


def test_a_conversation_that_is_too_long_loses_its_oldest_turns_where_that_is_asked_for(replica: Replica) -> None:
    words = "and so on, and so on" * (replica.model.max_model_len // 200)
    turns = [{"role": role, "content": f"{number} {words}"} for number in range(8) for role in ("user", "assistant")]
    asked = [*turns, QUESTION]
    with pytest.raises(openai.BadRequestError) as refused:
        create(replica, asked)
    assert refused.value.code == "context_length_exceeded"
    answer = create(replica, asked, instructions="Stay.", truncation="auto")
    head = [{"role": "system", "content": "Stay."}]
    fitting = [
        kept
        for at in range(0, len(turns), 2)
        if len(replica.prompt_ids(kept := [*head, *turns[at:], QUESTION])) <= replica.model.max_model_len - 12
    ]
    assert answer.output_text == replica.answer(fitting[0], 12)


def test_a_stream_cut_anywhere_is_carried_on_with_the_same_numbers(replica: Replica) -> None:
    body = json.dumps(GREEDY | {"input": "every cut", "max_output_tokens": 30, "stream": True}).encode()
    whole = ask((replica.host, replica.port), RESPONSES, body)
    for end in block_ends(whole)[2:]:
        check_carried_on(replica, whole, end, body)


class TestGuided:
    """With a model that follows guides."""

    @pytest.fixture
    def replica(self, guided_replica: Replica) -> Replica:
        return guided_replica

    def test_a_function_is_called_and_its_result_is_heard(self, replica: Replica) -> None:
        asked = {"tools": TOOLS, "tool_choice": "required", "max_output_tokens": 900, "parallel_tool_calls": False}
        answer = create(replica, **asked)
        (call,) = answer.output
        assert call.type == "function_call"
        assert (call.name, call.status) == ("get_weather", "completed")
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
        assert [tool.type for tool in answer.tools] == ["function"]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
        assert create(replica, [QUESTION, call, result], tools=TOOLS).output

    def test_the_arguments_of_a_call_are_streamed(self, replica: Replica) -> None:
        asked = {"tools": TOOLS, "tool_choice": "required", "max_output_tokens": 900, "parallel_tool_calls": False}
        whole, found = create(replica, **asked), streamed(replica, **asked)
        deltas = [event.delta for event in found if event.type == "response.function_call_arguments.delta"]
        (call,) = whole.output
        assert call.type == "function_call"
        assert "".join(deltas) == call.arguments
        assert len(deltas) > 1
        assert [event.sequence_number for event in found] == list(range(len(found)))
        assert found[-1].response.output[0].arguments == call.arguments

    def test_a_stream_with_calls_is_carried_on_anywhere(self, replica: Replica) -> None:
        asked = {"input": "go", "tools": TOOLS, "tool_choice": "required", "max_output_tokens": 900, "stream": True}
        body = json.dumps(GREEDY | asked | {"parallel_tool_calls": False}).encode()
        whole = ask((replica.host, replica.port), RESPONSES, body)
        for end in block_ends(whole)[2::7]:
            check_carried_on(replica, whole, end, body)

    def test_an_answer_is_parsed_into_the_applications_own_type(self, replica: Replica) -> None:
        class Forecast(BaseModel):
            sunny: bool
            days: list[bool]

        options = GREEDY | {"temperature": 1, "extra_body": {"seed": 3}}
        parsed = replica.openai.responses.parse(input="What is it?", text_format=Forecast, **options)
        assert isinstance(parsed.output_parsed, Forecast)
