"""The settings both endpoints share: their ranges, and what they become."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.openai import ChatRequest, GenerationOptions, for_choice, parse_chat
from penstock.core.errors import InvalidRequest, UnsupportedParameter
from penstock.core.request import Priority
from penstock.core.sampling import SamplingParams

VOCAB = 1000


def parse(**fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return parse_chat(json.dumps(body).encode())


def sampling(**fields: Any) -> SamplingParams:
    return parse(**fields).to_sampling(VOCAB, fallback_seed=7)


def options(**fields: Any) -> GenerationOptions:
    return parse(**fields).to_options(VOCAB)


def test_a_bare_request_gets_the_defaults() -> None:
    assert sampling() == SamplingParams(seed=7)
    assert options() == GenerationOptions()


def test_null_means_the_same_as_absent() -> None:
    fields = dict.fromkeys(name for name in ChatRequest.__struct_encode_fields__ if name not in ("model", "messages"))
    assert sampling(**fields) == sampling()
    assert options(**fields) == options()


def test_sampling_settings_are_carried_over() -> None:
    given_: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "repetition_penalty": 1.1,
        "logit_bias": {"999": -100},
        "seed": -(2**63),
    }
    assert sampling(**given_) == SamplingParams(**{**given_, "logit_bias": {999: -100.0}})


def test_options_are_carried_over() -> None:
    given_: dict[str, Any] = {
        "min_tokens": 1,
        "n": 3,
        "stop_token_ids": [1, 2],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "truncate_prompt_tokens": 5,
        "max_tokens": 9,
    }
    found = options(**given_, stop="END", cache_salt="a", stream=True, stream_options={"include_usage": True})
    expected = GenerationOptions(
        **{**given_, "stop_token_ids": (1, 2)},
        stop=("END",),
        namespace="a",
        stream=True,
        include_usage=True,
    )
    assert found == expected


@pytest.mark.parametrize("top_k", [-1, 0, VOCAB, VOCAB + 1])
def test_a_top_k_that_excludes_nothing_is_off(top_k: int) -> None:
    assert sampling(top_k=top_k).top_k is None


@pytest.mark.parametrize("temperature", [0, 1e-6, 1e-300])
def test_a_vanishing_temperature_is_greedy(temperature: float) -> None:
    assert sampling(temperature=temperature).is_greedy


@pytest.mark.parametrize(
    ("tier", "priority"),
    [
        ("priority", Priority.HIGH),
        ("default", Priority.NORMAL),
        ("flex", Priority.LOW),
        ("auto", None),
        (None, None),
    ],
)
def test_a_service_tier_is_a_priority(tier: str | None, priority: Priority | None) -> None:
    assert parse(service_tier=tier).wished_priority() is priority


def test_a_tier_that_is_none_or_beside_a_priority_is_refused() -> None:
    for fields in ({"service_tier": "scale"}, {"service_tier": "flex", "priority": "high"}):
        with pytest.raises(InvalidRequest) as caught:
            parse(**fields)
        assert caught.value.param == "service_tier"


@pytest.mark.parametrize("priority", ["low", 2])
def test_priority_is_a_name_or_a_number(priority: str | int) -> None:
    assert parse(priority=priority).wished_priority() is Priority.LOW


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", 1.1),
        ("n", 0),
        ("n", 129),
        ("max_tokens", 0),
        ("max_tokens", 2**31),
        ("top_k", -2),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("seed", 2**63),
        ("stop", ""),
        ("stop", ["x"] * 17),
        ("stop_token_ids", [-1]),
        ("truncate_prompt_tokens", 0),
        ("cache_salt", ""),
        ("priority", 3),
        ("model", ""),
    ],
)
def test_a_value_out_of_range_is_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**{field: value})
    assert caught.value.param == field or caught.value.param == f"{field}[0]"


@pytest.mark.parametrize(("field", "value"), [("logit_bias", {"1000": 1}), ("logit_bias", {"-1": 1})])
def test_a_bias_for_a_token_that_does_not_exist_is_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match="no token has the id"):
        sampling(**{field: value})


@pytest.mark.parametrize(
    ("biases", "told"),
    [
        ({"7": 1, "abc": 1}, "'abc' is no token id"),
        ({"1.5": 1}, "'1.5' is no token id"),
        ({"a": 1, "7": 1, "b": 2}, "'a', 'b' are no token ids"),
        ({"7": 1, "8": 100.5}, "token 8 has 100.5"),
        ({"8": -101}, "token 8 has -101"),
    ],
)
def test_a_wrong_bias_is_named(biases: dict[str, float], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told) as caught:
        parse(logit_bias=biases)
    assert caught.value.param == "logit_bias"


def test_a_stop_token_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        options(stop_token_ids=[5, VOCAB])
    assert caught.value.param == "stop_token_ids"


def test_stream_options_need_a_stream() -> None:
    with pytest.raises(InvalidRequest, match="stream is true"):
        parse(stream_options={"include_usage": True})


def test_the_usage_of_every_chunk_is_told_where_usage_is() -> None:
    asked = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": True}
    assert options(stream=True, stream_options=asked).continuous_usage
    assert not options(stream=True, stream_options=asked | {"include_usage": False}).continuous_usage


def test_more_tokens_at_least_than_at_most_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(min_tokens=11, max_tokens=10)
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("structured_outputs", {"json": {}, "whitespace_pattern": " "}),
        ("store", True),
    ],
)
def test_what_is_not_built_is_refused_and_never_ignored(field: str, value: object) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        parse(stream=True, **{field: value})
    assert str(caught.value.param).startswith(field)


def test_values_that_ask_for_nothing_are_fine() -> None:
    parse(response_format={"type": "text"}, store=False, service_tier="auto", user="u", metadata={"k": "v"})


@given(st.integers(-(2**63), 2**63 - 1))
def test_each_choice_has_a_seed_of_its_own_and_the_first_keeps_the_clients(seed: int) -> None:
    seeds = [for_choice(SamplingParams(seed=seed), index).seed for index in range(128)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 128
    assert all(-(2**63) <= s < 2**63 for s in seeds)
