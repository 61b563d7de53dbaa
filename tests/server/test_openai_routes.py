"""What an application does with the official client, checked against what the fake model must say."""

import math
from itertools import count
from typing import Any

import openai
import pytest

from penstock.server.gateway_headers import GatewayTrust
from tests.server.replica import EOS, NAME, Replica
from tests.waiting import eventually

CONVERSATION: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is it?"}]
GREEDY: Any = {"model": NAME, "temperature": 0}


def test_a_chat_is_answered(replica: Replica) -> None:
    answer = replica.openai.chat.completions.create(messages=CONVERSATION, max_tokens=12, **GREEDY)
    (choice,) = answer.choices
    assert (answer.object, answer.model) == ("chat.completion", NAME)
    assert choice.message.role == "assistant"
    assert choice.message.content == replica.answer(CONVERSATION, 12)
    assert choice.finish_reason == "length"
    assert choice.logprobs is None


def test_a_streamed_chat_says_the_same(replica: Replica) -> None:
    stream = replica.openai.chat.completions.create(messages=CONVERSATION, max_tokens=12, stream=True, **GREEDY)
    chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == replica.answer(CONVERSATION, 12)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert all(chunk.usage is None for chunk in chunks)


def test_a_completion_is_answered(replica: Replica) -> None:
    answer = replica.openai.completions.create(prompt="The quick", **GREEDY)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == replica.answer("The quick", 16), "16 tokens are OpenAI's default"


def test_a_streamed_completion_says_the_same(replica: Replica) -> None:
    stream = replica.openai.completions.create(prompt="The quick", max_tokens=9, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in stream) == replica.answer("The quick", 9)


def test_without_a_limit_an_answer_goes_on_to_the_end_of_sequence_or_of_the_context(replica: Replica) -> None:
    answer = replica.openai.chat.completions.create(messages=CONVERSATION, **GREEDY)
    room = replica.model.max_model_len - len(replica.prompt_ids(CONVERSATION))
    assert answer.choices[0].message.content == replica.answer(CONVERSATION, room)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(replica.answer_ids(CONVERSATION, room)) + 1, "its end is a token too"


def test_ignore_eos_goes_on_to_the_end_of_the_context(replica: Replica) -> None:
    answer = replica.openai.chat.completions.create(messages=CONVERSATION, extra_body={"ignore_eos": True}, **GREEDY)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.total_tokens == replica.model.max_model_len


# -- usage


def test_usage_counts_the_tokens(replica: Replica) -> None:
    answer = replica.openai.completions.create(prompt="usage is counted", max_tokens=5, **GREEDY)
    assert answer.usage is not None
    num_prompt_tokens = len(replica.prompt_ids("usage is counted"))
    assert answer.usage.prompt_tokens == num_prompt_tokens
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == num_prompt_tokens + 5


def test_usage_comes_last_in_a_stream_that_asks_for_it(replica: Replica) -> None:
    chunks = list(
        replica.openai.chat.completions.create(
            messages=CONVERSATION, max_tokens=5, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("is_chat", [True, False])
def test_usage_comes_with_every_chunk_of_a_stream_that_asks_for_that(replica: Replica, is_chat: bool) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    asked: Any = {"max_tokens": 5, "stream": True, "stream_options": options, **GREEDY}
    create: Any = replica.openai.chat.completions.create if is_chat else replica.openai.completions.create
    chunks = list(create(**asked, **({"messages": CONVERSATION} if is_chat else {"prompt": "a prompt"})))
    made = [chunk.usage.completion_tokens for chunk in chunks]
    assert made == sorted(made)
    assert made[-1] == 5
    assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1


def test_the_cached_part_of_a_prompt_is_reported_and_never_more_than_the_prompt(replica: Replica) -> None:
    prompt = "a prompt of several blocks that is asked for again and again"
    num_prompt_tokens = len(replica.prompt_ids(prompt))
    for n in (1, 4):
        answer = replica.openai.completions.create(prompt=prompt, max_tokens=2, n=n, **GREEDY)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == num_prompt_tokens
    assert answer.usage.prompt_tokens_details is not None
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert num_prompt_tokens - 4 <= cached < num_prompt_tokens


def test_a_cache_salt_keeps_prefixes_apart(replica: Replica) -> None:
    def cached(salt: str) -> int:
        body = {"cache_salt": salt}
        answer = replica.openai.completions.create(prompt="the salted prompt " * 4, extra_body=body, **GREEDY)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert cached("one") == 0
    assert cached("one") > 0
    assert cached("another") == 0


# -- choices, seeds, prompts


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices_have_seeds_of_their_own(replica: Replica, stream: bool) -> None:
    answer: Any = replica.openai.chat.completions.create(
        model=NAME, messages=CONVERSATION, n=3, seed=40, max_tokens=8, stream=stream
    )
    texts = {0: "", 1: "", 2: ""}
    if stream:
        for chunk in answer:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    else:
        texts = {choice.index: choice.message.content for choice in answer.choices}
        assert answer.usage.completion_tokens == 24
    assert texts == {i: replica.answer(CONVERSATION, 8, seed=40 + i) for i in range(3)}


def test_without_a_seed_answers_differ(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    assert GatewayTrust(None).draw_seed() != GatewayTrust(None).draw_seed()  # of 63 random bits
    monkeypatch.setattr(replica.app.trust, "draw_seed", count(5).__next__)
    texts = [replica.openai.completions.create(model=NAME, prompt="seed").choices[0].text for _ in range(3)]
    assert texts == [replica.answer("seed", 16, seed=5 + number) for number in range(3)]
    assert len(set(texts)) == 3


def test_a_list_of_prompts_is_answered_in_order(replica: Replica) -> None:
    prompts = ["first", "second", "third"]
    answer = replica.openai.completions.create(prompt=prompts, n=2, seed=5, max_tokens=4, model=NAME)
    wanted = [replica.answer(prompt, 4, seed=5 + i) for prompt in prompts for i in range(2)]
    assert [choice.text for choice in answer.choices] == wanted
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(replica.prompt_ids(prompt)) for prompt in prompts)


def test_a_prompt_of_token_ids_is_taken_as_it_is(replica: Replica) -> None:
    token_ids = replica.prompt_ids("by number")
    one = replica.openai.completions.create(prompt=token_ids, max_tokens=6, **GREEDY)
    two = replica.openai.completions.create(prompt=[token_ids, token_ids], max_tokens=6, **GREEDY)
    assert {choice.text for choice in one.choices + two.choices} == {replica.answer("by number", 6)}


@pytest.mark.parametrize("stream", [False, True])
def test_echo_begins_with_the_prompt(replica: Replica, stream: bool) -> None:
    answer: Any = replica.openai.completions.create(
        prompt=["one ", "two "], echo=True, max_tokens=4, stream=stream, **GREEDY
    )
    texts = ["", ""]
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == [prompt + replica.answer(prompt, 4) for prompt in ("one ", "two ")]


@pytest.mark.parametrize("priority", ["high", "low", 0, 2])
def test_a_priority_is_accepted(replica: Replica, priority: object) -> None:
    answer = replica.openai.completions.create(prompt="soon", extra_body={"priority": priority}, **GREEDY)
    assert answer.choices[0].text == replica.answer("soon", 16)


# -- where an answer ends


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("width", [1, 3, 9])
def test_a_stop_string_ends_the_answer_before_it_wherever_tokens_begin(
    replica: Replica, stream: bool, width: int
) -> None:
    whole = replica.answer("stop here", 30)
    stop = whole[12 : 12 + width]
    answer: Any = replica.openai.completions.create(
        prompt="stop here", max_tokens=30, stop=["never said", stop], stream=stream, **GREEDY
    )
    chunks = list(answer) if stream else [answer]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole[: whole.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"
    eventually(replica.is_idle)


def test_the_stop_string_stays_if_asked_for(replica: Replica) -> None:
    whole = replica.answer("stop here", 30)
    stop = whole[12:15]
    body = {"include_stop_str_in_output": True}
    answer = replica.openai.completions.create(prompt="stop here", max_tokens=30, stop=stop, extra_body=body, **GREEDY)
    assert answer.choices[0].text == whole[: whole.index(stop) + 3]


def test_a_stop_string_ends_one_choice_and_not_its_siblings(replica: Replica) -> None:
    wholes = [replica.answer("siblings", 20, seed=7 + i) for i in range(3)]
    stop = next(
        wholes[1][i : i + 4] for i in range(4, 16) if all(wholes[1][i : i + 4] not in wholes[j] for j in (0, 2))
    )
    answer = replica.openai.completions.create(model=NAME, prompt="siblings", max_tokens=20, n=3, seed=7, stop=stop)
    wanted = [wholes[0], wholes[1][: wholes[1].index(stop)], wholes[2]]
    assert [choice.text for choice in answer.choices] == wanted
    assert [choice.finish_reason for choice in answer.choices] == ["length", "stop", "length"]


def test_a_stop_token_ends_the_answer_and_is_no_part_of_it(replica: Replica) -> None:
    token_ids = replica.answer_ids("stop token", 20)
    stop_at = next(i for i in range(4, 20) if token_ids[i] not in token_ids[:i])
    body = {"stop_token_ids": [token_ids[stop_at]]}
    answer = replica.openai.completions.create(prompt="stop token", max_tokens=20, extra_body=body, **GREEDY)
    assert answer.choices[0].text == replica.model.tokenizer.decode(token_ids[:stop_at])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == stop_at + 1


def test_a_text_that_ends_within_a_character_is_still_the_same_streamed_or_not(replica: Replica) -> None:
    for limit in range(1, 20):
        whole = replica.openai.completions.create(prompt="character", max_tokens=limit, **GREEDY).choices[0].text
        stream = replica.openai.completions.create(prompt="character", max_tokens=limit, stream=True, **GREEDY)
        assert "".join(chunk.choices[0].text for chunk in stream) == whole == replica.answer("character", limit)


# -- logprobs


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_have_an_entry_for_every_token(replica: Replica, stream: bool) -> None:
    answer: Any = replica.openai.chat.completions.create(
        messages=CONVERSATION, max_tokens=6, logprobs=True, top_logprobs=3, stream=stream, **GREEDY
    )
    found = [choice.logprobs for part in (answer if stream else [answer]) for choice in part.choices if choice.logprobs]
    entries = [entry for logprobs in found for entry in logprobs.content]
    tokenizer = replica.model.tokenizer
    token_ids = replica.answer_ids(CONVERSATION, 6)
    assert [bytes(entry.bytes) for entry in entries] == [tokenizer.token_bytes(token_id) for token_id in token_ids]
    for entry in entries:
        assert entry.logprob == pytest.approx(-math.log(2))
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token
        ordered = [other.logprob for other in entry.top_logprobs]
        assert ordered == sorted(ordered, reverse=True)


def test_logprobs_without_alternatives_have_none(replica: Replica) -> None:
    answer = replica.openai.chat.completions.create(messages=CONVERSATION, max_tokens=4, logprobs=True, **GREEDY)
    assert answer.choices[0].logprobs is not None
    assert [entry.top_logprobs for entry in answer.choices[0].logprobs.content or []] == [[]] * 4


def test_completion_logprobs_are_parallel_lists(replica: Replica) -> None:
    answer = replica.openai.completions.create(prompt="parallel", max_tokens=5, logprobs=2, **GREEDY)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert len(logprobs.tokens) == 5
    assert logprobs.token_logprobs == pytest.approx([-math.log(2)] * 5)
    assert logprobs.text_offset is not None
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    assert logprobs.top_logprobs is not None
    assert all(len(entry) <= 2 for entry in logprobs.top_logprobs)


def test_the_end_of_sequence_has_no_logprobs_entry_since_it_has_no_text(replica: Replica) -> None:
    token_ids = replica.answer_ids("to the end", 1500)
    assert EOS not in token_ids
    answer = replica.openai.completions.create(prompt="to the end", max_tokens=1500, logprobs=0, **GREEDY)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.tokens or []) == len(token_ids)


# -- models


def test_the_model_is_listed(replica: Replica) -> None:
    (card,) = replica.openai.models.list().data
    assert card.id == NAME
    assert replica.openai.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        replica.openai.models.retrieve("another")
