"""Guided answers from a whole replica, whose model says random things, as clients of several servers ask for them."""

from __future__ import annotations

import json
import re
import threading
from typing import Any, Literal

import anthropic
import openai
import psutil
import pytest
from pydantic import BaseModel

from penstock.api.relay import StreamRecord, find_cost, is_whole
from tests.sdk import Unverified
from tests.server import relaying
from tests.server.replica import NAME, Replica, serving
from tests.waiting import GIVE_UP_S, eventually

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "Who is it?"}]


class Pet(BaseModel):
    name: str
    kind: Literal["cat", "dog"]
    legs: int
    friends: list[str]


class Beast(BaseModel):
    kind: Literal["cat", "dog"]


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 2, "maximum": 4}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def replica(guided_replica: Replica) -> Replica:
    return guided_replica


def ask(replica: Replica, **body: Any) -> tuple[int, Any]:
    status, _, answer = replica.post(CHAT, messages=MESSAGES, **{"max_tokens": 300, "seed": 1} | body)
    return status, answer


def content(replica: Replica, **body: Any) -> str:
    status, answer = ask(replica, **body)
    assert status == 200, answer
    assert answer["choices"][0]["finish_reason"] == "stop"
    return str(answer["choices"][0]["message"]["content"])


def refusal(replica: Replica, **body: Any) -> dict[str, Any]:
    status, answer = ask(replica, **body)
    assert status == 400, answer
    error: dict[str, Any] = answer["error"]
    return error


SMALL: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 5}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def test_openais_client_parses_answers_into_pydantic_models(replica: Replica) -> None:
    for seed in range(5):
        answer = replica.openai.chat.completions.parse(
            model=NAME, messages=MESSAGES, response_format=Pet, seed=seed, max_tokens=400
        )
        choice = answer.choices[0]
        if choice.finish_reason == "stop":
            assert choice.message.parsed is not None
            assert choice.message.parsed.kind in ("cat", "dog")
            return
    raise AssertionError("no answer came to its end")


def test_anthropics_client_parses_answers_too(replica: Replica) -> None:
    client = anthropic.Anthropic(
        base_url=f"http://{replica.host}:{replica.port}", api_key="none", max_retries=0, http_client=Unverified()
    )
    asked: Any = {"model": NAME, "max_tokens": 300, "messages": MESSAGES}
    assert client.messages.parse(**asked, output_format=Beast).parsed_output in (Beast(kind="cat"), Beast(kind="dog"))
    named = {"type": "json_schema", "schema": SCHEMA}
    for body in ({"output_config": {"format": named}}, {"output_format": named}):
        (block,) = client.messages.create(**asked, extra_body=body).content
        assert block.type == "text"
        answer = json.loads(block.text)
        assert answer["kind"] in ("cat", "dog")
        assert 2 <= answer["legs"] <= 4
    for wrong in (
        {"output_config": {"format": named}, "output_format": named},
        {"output_format": named | {"schema": 3}},
    ):
        with pytest.raises(anthropic.BadRequestError, match="output_format"):
            client.messages.create(**asked, extra_body=wrong)
    hopeless = {"type": "json_schema", "schema": {"type": "array", "uniqueItems": True}}
    with pytest.raises(anthropic.BadRequestError, match=r"output_config: .*uniqueItems"):
        client.messages.create(**asked, extra_body={"output_config": {"format": hopeless}})


def test_openais_client_streams_guided_answers(replica: Replica) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "small", "strict": True, "schema": SMALL}}
    stream = replica.openai.chat.completions.create(
        model=NAME, messages=MESSAGES, response_format=form, stream=True, max_tokens=100, seed=1
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert set(json.loads(text)) == {"a", "b"}


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SMALL}}},
        {"response_format": {"type": "json_object", "schema": SMALL}},
        {"response_format": {"type": "json", "value": SMALL}},
        {"guided_json": SMALL},
        {"guided_json": json.dumps(SMALL)},
        {"structured_outputs": {"json": SMALL}},
        {"json_schema": json.dumps(SMALL)},
    ],
)
def test_every_way_to_ask_for_a_schema_is_understood(replica: Replica, body: dict[str, Any]) -> None:
    found = json.loads(content(replica, **body))
    assert set(found) == {"a", "b"}
    assert isinstance(found["b"], bool)


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"guided_regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"structured_outputs": {"regex": "[a-c]{3}"}}, "[a-c]{3}"),
        ({"response_format": {"type": "regex", "value": "[a-c]{3}"}}, "[a-c]{3}"),
        ({"guided_choice": ["yes", "no", "may be"]}, "yes|no|may be"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_grammar": 'start: "<" /[a-z]{2}/ ">"'}, "<[a-z]{2}>"),
        ({"ebnf": 'root ::= "<" [a-z] [a-z] ">"'}, "<[a-z]{2}>"),
        ({"response_format": {"type": "grammar", "grammar": 'root ::= "<" [a-z] ">"'}}, "<[a-z]>"),
    ],
)
def test_every_other_guide_is_followed(replica: Replica, body: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, content(replica, **body))


def test_choices_differ_and_all_follow_their_guide(replica: Replica) -> None:
    status, answer = ask(replica, n=8, guided_regex="[a-z]{4}")
    assert status == 200
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert all(re.fullmatch("[a-z]{4}", text) for text in texts)
    assert len(set(texts)) > 3


def test_completions_are_guided_too_and_stop_strings_still_stop(replica: Replica) -> None:
    status, _, answer = replica.post("/v1/completions", prompt="It is", max_tokens=50, guided_regex="[0-9]{6}")
    assert status == 200
    assert re.fullmatch("[0-9]{6}", answer["choices"][0]["text"])
    assert content(replica, guided_regex="aaaa,[a-z]{5}", stop=[","]) == "aaaa"


def test_log_probabilities_are_those_of_the_tokens_that_came(replica: Replica) -> None:
    status, answer = ask(replica, guided_regex="one two three", logprobs=True)
    assert status == 200
    choice = answer["choices"][0]
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == choice["message"]["content"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"guided_json": {"not": {}}}, "guided_json", "not"),
        ({"guided_regex": "(?<=a)b"}, "guided_regex", "look-behind"),
        (
            {"response_format": {"type": "json_object", "schema": {"uniqueItems": True}}},
            "response_format",
            "uniqueItems",
        ),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs", "nothing"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "no answer can follow it"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name_before_anything_is_generated(
    replica: Replica, body: dict[str, Any], param: str, words: str
) -> None:
    error = refusal(replica, **body)
    assert (error["code"], error["param"]) == ("unsupported_parameter", param)
    assert words in error["message"]


def test_a_refusal_is_as_quick_the_second_time(replica: Replica) -> None:
    body = {"guided_json": {"not": {"type": "string"}}}
    assert refusal(replica, **body) == refusal(replica, **body)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE: dict[str, dict[str, Any]] = {
    "a huge enum": {"guided_json": {"enum": [f"{i:x}{i * i:x}" for i in range(8000)]}},
    "thousands of properties": {"guided_json": {"properties": {f"{i}": {} for i in range(7000)}}},
    "deep nesting": {"guided_json": nested(400)},
    "doubling": {
        "guided_json": {
            "$ref": "#/$defs/d0",
            "$defs": {
                f"d{i}": {"allOf": [{"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"type": "null"}]}] * 2}
                for i in range(30)
            }
            | {"d30": {"type": "string"}},
        }
    },
    "a regex in a regex": {"guided_regex": "((((((a{1,99}){1,99}){1,99}){1,99}){1,99}){1,99}){1,99}"},
    "parentheses": {"guided_regex": "(" * 20_000 + ")" * 20_000},
    "alternatives": {
        "guided_grammar": "start: "
        + " | ".join(f"r{i}" for i in range(300))
        + "".join(f'\nr{i}: start start "x"{{1000}}' for i in range(300))
    },
    "llama.cpp's parentheses": {"guided_grammar": "root ::= " + "(" * 30_000},
}


FAILING: list[tuple[str, Any]] = [  # at the first tokens, by limits that a first mask does not meet
    ("guided_regex", "\\"),
    ("guided_regex", "(?:a?){500}a{500}"),
    ("guided_grammar", "start:"),
    ("guided_grammar", 'start: "a"{100000}'),
    ("guided_json", {"type": "array", "items": {"$ref": "#"}, "minItems": 3}),
]
LATE = {"guided_grammar": 'start: /[a-z]{8}/ "x"{100000}'}  # after a few tokens


@pytest.mark.parametrize(("param", "source"), FAILING)
def test_a_guide_that_fails_is_the_fault_of_its_request(replica: Replica, param: str, source: Any) -> None:
    for more in ({}, {"stream": True}, {"logprobs": True}):
        error = refusal(replica, **{param: source}, **more)
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert error["message"].startswith(f"{param}: ")
    assert content(replica, guided_choice=["yes"]) == "yes"


def test_a_guide_that_fails_on_the_way_is_the_fault_of_its_request_too(replica: Replica) -> None:
    error = refusal(replica, **LATE)
    assert (error["code"], error["param"]) == ("unsupported_parameter", "guided_grammar")
    stream = replica.openai.chat.completions.create(model=NAME, messages=MESSAGES, stream=True, seed=1, extra_body=LATE)
    with pytest.raises(openai.APIError, match="could not be kept to its guide") as caught:
        list(stream)
    assert caught.value.type == "invalid_request_error"


def test_a_relayed_stream_that_ends_by_its_guide_is_not_to_be_carried_on(replica: Replica) -> None:
    body = json.dumps({"model": NAME, "messages": MESSAGES, "stream": True, "seed": 1} | LATE).encode()
    stream = relaying.ask((replica.host, replica.port), CHAT, body)
    assert is_whole(stream)
    assert find_cost(stream) is not None
    error = json.loads(relaying.events(stream)[-1].removeprefix(b"data: "))["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "unsupported_parameter")


def test_hostile_guides_cost_their_senders_an_error_and_the_next_is_tried_as_ever(replica: Replica) -> None:
    """Each is refused by its own limits, long before the server's patience with the process ends, or followed."""
    for name, body in HOSTILE.items():
        status, answer = ask(replica, **body, max_tokens=10)
        assert status in (200, 400), (name, answer)
        if status == 400:
            assert answer["error"]["param"] == next(iter(body)), name
        if name == "thousands of properties":  # they take several times the processor time that a trial has
            assert (status, answer["error"]["code"]) == (400, "unsupported_parameter")
            assert "too complex" in answer["error"]["message"]
        assert content(replica, guided_choice=[f"after {name}"]) == f"after {name}"


def test_others_go_on_while_a_guide_is_tried(replica: Replica) -> None:
    assert content(replica, guided_choice=["warm"]) == "warm"
    answers: list[tuple[int, Any]] = []
    guided = threading.Thread(target=lambda: answers.append(ask(replica, guided_choice=["in the end"])))
    (process,) = guide_processes(replica)
    process.suspend()
    try:
        guided.start()
        eventually(lambda: replica.app._guides._open)  # type: ignore[union-attr]
        for _ in range(3):
            assert ask(replica, max_tokens=20)[0] == 200
        assert answers == []
    finally:
        process.resume()
    guided.join(GIVE_UP_S)
    ((status, answer),) = answers
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "in the end")


def test_a_guided_stream_that_is_cut_anywhere_is_carried_on(replica: Replica, other_guided_replica: Replica) -> None:
    other = other_guided_replica
    body = json.dumps(
        {"model": NAME, "messages": MESSAGES, "stream": True, "seed": 7, "max_tokens": 60, "guided_json": SMALL}
    ).encode()
    whole = relaying.ask((replica.host, replica.port), CHAT, body)
    for end in relaying.block_ends(whole)[1:-1]:
        record = StreamRecord()
        record.append(whole[:end])
        rest = relaying.carry_on(record, (other.host, other.port), CHAT, body)
        assert relaying.events(whole[:end] + rest) == relaying.events(whole)


def guide_processes(replica: Replica) -> list[psutil.Process]:
    trials = replica.app._guides
    assert trials is not None
    return [psutil.Process(trials._process.pid)] if trials._process is not None else []


def test_guides_are_counted_and_their_process_is_started_when_it_is_needed_and_again_when_it_died() -> None:
    with serving(is_guided=True) as fresh:
        assert ask(fresh, max_tokens=5)[0] == 200
        assert guide_processes(fresh) == [], "nobody was guided"
        for _ in range(2):
            assert content(fresh, guided_choice=["a long word that is forced"]) == "a long word that is forced"
        assert refusal(fresh, guided_regex="(")
        found = fresh.final_metrics()
        named = "penstock_guided_requests_total"
        assert found[f"{named}{{grammar,new}}"] == 1
        assert found[f"{named}{{grammar,known}}"] == 1
        assert found[f"{named}{{regex,refused}}"] == 1
        assert found["penstock_guide_trial_seconds_count"] == 2
        assert 0 < found["penstock_forced_tokens_total"] < found["penstock_generated_tokens_total"]

        (process,) = guide_processes(fresh)
        process.kill()
        known = {"guided_choice": ["a long word that is forced"]}
        assert content(fresh, **known) == "a long word that is forced"  # it was tried before
        # Who asks in the very moment is told to come again.
        status, answer = eventually(lambda: ask(fresh, guided_choice=["two"]), lambda found: found[0] != 503)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "two")
        (again,) = guide_processes(fresh)
        assert again != process
    assert not process.is_running()
    assert not again.is_running()


def test_more_than_one_guide_is_refused(replica: Replica) -> None:
    error = refusal(replica, guided_regex="a", guided_choice=["b"])
    assert error["param"] == "guided_choice"


def test_a_guided_answer_is_not_one_that_never_ends(replica: Replica) -> None:
    assert refusal(replica, guided_regex="a", ignore_eos=True)["param"] == "ignore_eos"


def test_openais_errors_name_the_field(replica: Replica) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        replica.openai.chat.completions.create(
            model=NAME,
            messages=MESSAGES,
            response_format={"type": "json_schema"},  # type: ignore[arg-type, typeddict-item]
        )
    assert caught.value.param == "response_format.json_schema"
