"""Completion requests: the four shapes of a prompt, and the parameters that only completions have."""

import json
from typing import Any

import pytest
from openai.types import completion_create_params as openai_params

from penstock.api.openai import CompletionRequest, parse_completion
from penstock.core.errors import InvalidRequest, UnsupportedParameter
from penstock.text.fill_in import FillInMarks

VOCAB = 100


def parse(prompt: Any = "once", **fields: Any) -> CompletionRequest:
    return parse_completion(json.dumps({"model": "m", "prompt": prompt, **fields}).encode())


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("once", ["once"]),
        (["once", "twice"], ["once", "twice"]),
        ([1, 2, 99], [[1, 2, 99]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_a_prompt_has_four_shapes(prompt: object, expected: object) -> None:
    assert parse(prompt).prompts(VOCAB, None) == expected


@pytest.mark.parametrize("prompt", [None, 5, [], [[]], [1, "a"], [[1], 2], [1.5], [-1], {"a": 1}, ["a"] * 1025])
def test_other_shapes_are_refused(prompt: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(prompt)
    assert str(caught.value.param).startswith("prompt")


@pytest.mark.parametrize("prompt", [[VOCAB], [[1], [VOCAB]]])
def test_token_ids_that_do_not_exist_are_refused(prompt: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(prompt).prompts(VOCAB, None)
    assert caught.value.param == "prompt"


def test_the_output_limit_is_sixteen_as_at_openai() -> None:
    assert parse().to_options(VOCAB).max_tokens == 16
    assert parse(max_tokens=None).to_options(VOCAB).max_tokens == 16
    assert parse(max_tokens=100).to_options(VOCAB).max_tokens == 100


def test_logprobs_are_a_number() -> None:
    assert parse(logprobs=0).to_sampling(VOCAB, fallback_seed=1).num_logprobs == 0
    assert parse(logprobs=20).num_logprobs() == 20
    with pytest.raises(InvalidRequest):
        parse(logprobs=True)
    with pytest.raises(InvalidRequest):
        parse(logprobs=21)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"prompt": ["a"] * 600, "best_of": 2}, "prompt"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_what_cannot_be_had_together_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, None),
        ({"echo": True}, None),
        ({"logprobs": 3}, None),
        ({"echo": True, "logprobs": 0}, 0),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 1}, 3),
        ({"prompt_logprobs": 2}, 2),
    ],
)
def test_prompts_are_scored_for_an_echo_with_logprobs_and_where_that_is_asked_for(fields: Any, count: Any) -> None:
    assert parse(**fields).num_prompt_logprobs() == count


def test_the_best_are_found_by_their_log_probabilities() -> None:
    assert parse(best_of=3).num_logprobs() == 0
    assert parse(best_of=3, logprobs=2).num_logprobs() == 2
    assert parse(best_of=1).num_logprobs() is None
    assert parse(best_of=3, n=2).to_options(100).n == 3


def test_a_suffix_is_put_after_the_prompt_by_the_models_own_marks() -> None:
    marks = FillInMarks("<P>", "<S>", "<M>")
    assert parse(["a", "b"], suffix="z").prompts(VOCAB, marks) == ["<P>a<S>z<M>", "<P>b<S>z<M>"]
    assert parse("a", suffix="").prompts(VOCAB, None) == ["a"]
    with pytest.raises(UnsupportedParameter) as caught:
        parse("a", suffix="z").prompts(VOCAB, None)
    assert caught.value.param == "suffix"
    for fields in ({"echo": True}, {"prompt": [1, 2]}):
        with pytest.raises(InvalidRequest, match="suffix"):
            parse(**{"suffix": "z"} | fields)


def test_best_of_may_repeat_n() -> None:
    parse(best_of=1)
    parse(best_of=3, n=3)


def test_the_number_of_choices_of_all_prompts_together_is_limited() -> None:
    parse(["a"] * 8, n=128)
    with pytest.raises(InvalidRequest, match="1024"):
        parse(["a"] * 9, n=128)


def test_every_parameter_the_openai_client_can_send_is_known() -> None:
    sent = openai_params.CompletionCreateParamsStreaming.__annotations__.keys()
    assert set(sent) <= set(CompletionRequest.__struct_encode_fields__)
