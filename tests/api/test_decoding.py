"""Whatever arrives, the answer is a request or an InvalidRequest that says which field and why."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api import decoding
from penstock.api.decoding import MAX_ITEMS, MAX_OBJECTS
from penstock.api.openai import ChatRequest, CompletionRequest, parse_chat, parse_completion
from penstock.core.errors import InvalidRequest

GOOD: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def refusal(body: bytes | dict[str, Any]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(body if isinstance(body, bytes) else json.dumps(body).encode())
    return caught.value


@pytest.mark.parametrize(
    ("field", "value", "param", "message"),
    [
        ("temperature", "hot", "temperature", "temperature: expected a number, got a string"),
        ("temperature", 2.5, "temperature", "temperature: must be <= 2.0"),
        ("top_p", 0, "top_p", "top_p: must be > 0.0"),
        ("n", 1.5, "n", "n: expected an integer, got a number"),
        ("n", True, "n", "n: expected an integer, got true or false"),
        ("stream", "yes", "stream", "stream: expected true or false, got a string"),
        ("stop", 5, "stop", "stop: expected a string or a list, got an integer"),
        ("stop", ["a"] * 100, "stop", "stop: must be of length <= 16"),
        ("stop", ["a", ""], "stop[1]", "stop[1]: must be of length >= 1"),
        (
            "logit_bias",
            {"cat": 1},
            "logit_bias",
            "logit_bias: 'cat' is no token id: expected every key to be an integer",
        ),
        ("logit_bias", {"1": 101}, "logit_bias", "logit_bias: token 1 has 101; a bias is between -100 and 100"),
        ("messages", [], "messages", "messages: must be of length >= 1"),
        ("messages", [{"content": "hi"}], "messages[0].role", "messages[0].role: is required"),
        ("priority", "urgent", "priority", "priority: 'urgent' is not one of 'high', 'normal', 'low', 0, 1, 2"),
        ("tempurature", 1, "tempurature", "unknown field 'tempurature'; did you mean 'temperature'?"),
        (
            "stream_options",
            {"include_usages": True},
            "stream_options.include_usages",
            "unknown field 'stream_options.include_usages'; did you mean 'stream_options.include_usage'?",
        ),
        (
            "messages",
            [{"role": "user", "contents": "hi"}],
            "messages[0].contents",
            "unknown field 'messages[0].contents'; did you mean 'messages[0].content'?",
        ),
        (
            "messages",
            [{"role": "robot", "content": "hi"}],
            "messages[0].role",
            "messages[0].role: 'robot' is not one of 'system', 'developer', 'user', 'assistant', 'tool'",
        ),
    ],
)
def test_a_wrong_field_is_named_and_explained(field: str, value: object, param: str, message: str) -> None:
    error = refusal(GOOD | {field: value})
    assert (error.param, error.message) == (param, message)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is empty"),
        (b"  \n", "the body is empty"),
        (b"{", "not valid JSON"),
        (json.dumps(GOOD).encode() + b" x", "not valid JSON"),
        (b'{"temperature": NaN}', "not valid JSON"),
        (b'{"temperature": Infinity}', "not valid JSON"),
        (b'{"temperature": 1e999}', "temperature: number out of range"),
        (b'{"model": "\xff"}', "it is not UTF-8"),
        (b'{"model": "\\ud800"}', "not valid JSON"),
        (b'{"moderation": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"seed": 1' + b"0" * 5000 + b"}", "seed: "),
        (b"[]", "body: expected an object, got a list"),
        (b"null", "body: expected an object, got null"),
        (b"{}", "model: is required"),
    ],
)
def test_a_body_that_is_no_request_is_explained(body: bytes, message: str) -> None:
    assert message in refusal(body).message


def test_an_unknown_name_that_looks_like_msgspecs_own_words_does_no_harm() -> None:
    for name in ("x` - at `$.messages", "` - at `$.nope[0].no`", "x" * 100_000, "a\nb` - at `key` in `$`"):
        error = refusal(GOOD | {name: 1})
        assert error.message.startswith("unknown field")
        assert len(error.message) < 300


FIELDS = sorted({*ChatRequest.__struct_encode_fields__, *CompletionRequest.__struct_encode_fields__})
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS) | st.text(), inner, max_size=4),
    max_leaves=10,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "robot"]), "content": SCALARS | JSON})
)
FEW = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6)
BODIES = st.builds(lambda fields, messages: {"messages": messages} | fields | {"model": "m"}, FEW, MESSAGES | JSON)


def only_invalid_request(body: bytes) -> None:
    for parse in (parse_chat, parse_completion):
        with contextlib.suppress(InvalidRequest):
            request = parse(body)
            request.to_sampling(100, fallback_seed=1)
            request.to_options(100)
            if isinstance(request, ChatRequest):
                request.conversation()
            else:
                request.prompts(100, None)


@given(BODIES | JSON)
def test_any_json_is_a_request_or_an_invalid_request(body: object) -> None:
    only_invalid_request(json.dumps(body).encode())


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_an_invalid_request(body: bytes) -> None:
    only_invalid_request(body)


@given(st.data())
def test_a_damaged_request_is_a_request_or_an_invalid_request(data: st.DataObject) -> None:
    body = bytearray(json.dumps(GOOD | {"stop": ["a"], "logit_bias": {"5": 1.0}, "prompt": [1, 2]}).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    only_invalid_request(bytes(body))


def words(body: bytes) -> str:
    with pytest.raises(InvalidRequest) as refused:
        parse_completion(body)
    return refused.value.message


@pytest.mark.parametrize(
    "values",
    [
        b'"prompt":[' + b"1," * MAX_ITEMS + b"1]",
        b'"prompt":[' + b"[1]," * MAX_OBJECTS + b"[1]]",
        b'"metadata":{' + b'"a":"",' * MAX_OBJECTS + b'"a":""}',
        b'"user":' + b"[" * (2 * MAX_OBJECTS),
    ],
    ids=["items", "lists", "members", "depth"],
)
def test_a_body_of_too_many_values_is_refused_before_it_is_decoded(values: bytes) -> None:
    """Also behind strings that are full of quotation marks and backslashes."""
    for text in (b"", rb"\"\\\\\"[{:,\\"):
        assert "the body has more than" in words(b'{"model":"' + text + b'",' + values + b"}")


def test_what_stands_in_strings_is_not_taken_for_values() -> None:
    text = r"""[{"a": 1, 'b\\": 2,},]""" * 40_000
    body = json.dumps({"model": "m", "prompt": text}).encode()
    assert body.count(b"{") + body.count(b"[") + body.count(b":") > MAX_OBJECTS
    assert parse_completion(body).prompt == text


@pytest.mark.parametrize("name", ["a" * 100_000, " - at `$" * 10_000, "x`" * 50_000])
def test_of_a_long_name_little_is_looked_at_and_less_repeated(name: str) -> None:
    for body in ({"model": "m", "prompt": "p", name: 1}, {"model": "m", "prompt": "p", "priority": name}):
        assert len(words(json.dumps(body).encode())) < 300


def test_what_is_wrong_with_a_long_value_is_told_with_its_path() -> None:
    body = {"model": "m", "messages": [{"role": "a" * 100_000, "content": ""}]}
    with pytest.raises(InvalidRequest) as refused:
        parse_chat(json.dumps(body).encode())
    assert refused.value.param == "messages[0].role"


@pytest.mark.parametrize("part_bytes", [1, 2, 3, 7, 1000])
def test_what_stands_in_strings_is_left_out_wherever_a_part_ends(
    part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "_PART_BYTES", part_bytes)
    body = rb'{"a":["b,\"[{",1,"\\",{"c:":"\\\""}],"":2}'
    assert b"".join(decoding._outside_strings(body)) == b"{:[,1,,{:}],:2}"
