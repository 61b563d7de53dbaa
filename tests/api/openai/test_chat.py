"""Chat requests: messages, and the parameters that only chat has."""

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage
from openai.types.chat import completion_create_params as openai_params

from penstock.api.openai import ChatRequest, parse_chat
from penstock.core.errors import InvalidRequest, UnsupportedParameter

USER = {"role": "user", "content": "hi"}


def parse(messages: Any = (USER,), **fields: Any) -> ChatRequest:
    return parse_chat(json.dumps({"model": "m", "messages": list(messages), **fields}).encode())


def test_text_parts_become_one_string() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert parse([{"role": "user", "content": parts}]).conversation() == [{"role": "user", "content": "one\ntwo"}]


def test_every_role_reaches_the_template_and_developer_speaks_as_system() -> None:
    roles = ["system", "developer", "user", "assistant", "tool"]
    conversation = parse([{"role": role, "content": ""} for role in roles]).conversation()
    assert [message["role"] for message in conversation] == ["system", "system", "user", "assistant", "tool"]


def test_names_reach_the_template_when_given() -> None:
    message = {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "add"}
    assert parse([message]).conversation() == [message]


def test_an_answer_can_be_sent_back_as_the_client_received_it() -> None:
    answer = ChatCompletionMessage(role="assistant", content="hello").model_dump()
    assert parse([USER, answer, USER]).conversation()[1] == {"role": "assistant", "content": "hello"}


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "input_audio"}, "messages[0].content[0].type"),
        ({"type": "hologram"}, "messages[0].content[0].type"),
    ],
)
def test_parts_that_are_not_text_are_unsupported(part: object, param: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        parse([{"role": "user", "content": [part]}])
    assert caught.value.param == param


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "assistant", "content": None}])
def test_a_message_without_content_is_refused(message: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse([USER, message])
    assert caught.value.param == "messages[1].content"


def test_a_text_part_without_text_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse([{"role": "user", "content": [{"type": "text"}]}])
    assert caught.value.param == "messages[0].content[0].text"


def test_an_assistants_calls_of_custom_tools_are_unsupported() -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        parse([{"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "custom", "custom": {}}]}])
    assert caught.value.param == "messages[0].tool_calls[0].type"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_an_answer_goes_back_with_its_reasoning(name: str) -> None:
    chat = parse([USER, {"role": "assistant", "content": "yes", name: "hm"}, USER])
    assert chat.conversation()[1] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    with pytest.raises(InvalidRequest, match="only the assistant reasons") as caught:
        parse([{**USER, name: "hm"}])
    assert caught.value.param == f"messages[0].{name}"


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, {}),
        ({"reasoning_effort": None}, {}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True, "thinking": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {"reasoning_effort": "none", "enable_thinking": True, "thinking": False},
        ),
    ],
)
def test_the_effort_of_reasoning_is_a_variable_of_the_template(
    fields: dict[str, Any], variables: dict[str, Any]
) -> None:
    assert parse(**fields).template_variables() == variables


def test_max_completion_tokens_wins() -> None:
    assert parse(max_completion_tokens=5).output_limit() == 5
    assert parse(max_tokens=5, max_completion_tokens=5).output_limit() == 5
    assert parse(max_tokens=4).output_limit() == 4
    assert parse().output_limit() is None


def test_two_different_output_limits_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="differs"):
        parse(max_tokens=4, max_completion_tokens=5)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_logprobs_become_a_number(fields: dict[str, Any], expected: int | None) -> None:
    assert parse(**fields).num_logprobs() == expected


@pytest.mark.parametrize("fields", [{"top_logprobs": 1}, {"logprobs": True, "top_logprobs": 21}])
def test_top_logprobs_need_logprobs_and_have_a_limit(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert caught.value.param == "top_logprobs"


def test_the_template_opens_an_answer_unless_told_otherwise() -> None:
    assistant = {"role": "assistant", "content": "I"}
    assert parse().opens_answer()
    assert not parse(add_generation_prompt=False).opens_answer()
    assert not parse([USER, assistant], continue_final_message=True).opens_answer()


def test_only_the_assistants_last_message_can_be_continued() -> None:
    with pytest.raises(InvalidRequest, match="last message"):
        parse(continue_final_message=True)
    with pytest.raises(InvalidRequest, match="cannot go with"):
        parse(continue_final_message=True, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{}]),
        ("function_call", {"name": "f"}),
        ("modalities", ["text", "audio"]),
        ("audio", {}),
        ("verbosity", "low"),
        ("web_search_options", {}),
    ],
)
def test_what_is_not_built_is_refused_and_never_ignored(field: str, value: object) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        parse(**{field: value})
    assert caught.value.param == field


def test_values_that_ask_for_nothing_are_fine() -> None:
    parse(tools=[], tool_choice="auto", function_call="none", modalities=["text"], parallel_tool_calls=True)


def test_every_parameter_the_openai_client_can_send_is_known() -> None:
    sent = openai_params.CompletionCreateParamsStreaming.__annotations__.keys()
    assert set(sent) <= set(ChatRequest.__struct_encode_fields__)


def test_a_prediction_is_read_and_tells_the_model_nothing() -> None:
    prediction = {"type": "content", "content": [{"type": "text", "text": "as before"}]}
    asked, plain = parse(prediction=prediction), parse()
    assert asked.conversation() == plain.conversation()
    assert asked.to_sampling(100, fallback_seed=1) == plain.to_sampling(100, fallback_seed=1)
    with pytest.raises(InvalidRequest) as caught:
        parse(prediction={"type": "content"})
    assert caught.value.param == "prediction.content"
