"""Tokens that may or may not come, and ids that are told."""

from typing import Any

import pytest

from tests.server.replica import NAME, Replica

GREEDY: Any = {"model": NAME, "temperature": 0, "prompt": "The quick", "max_tokens": 8}
CHAT: Any = {"messages": [{"role": "user", "content": "What is it?"}], "max_tokens": 6, "temperature": 0}


def completed(replica: Replica, **fields: Any) -> Any:
    status, _, found = replica.call("POST", "/v1/completions", GREEDY | fields)
    assert status == 200, found
    return found["choices"][0]


def test_nothing_but_allowed_tokens_comes(replica: Replica) -> None:
    plain = completed(replica, return_token_ids=True)["token_ids"]
    allowed = [10, 11, 12]
    assert not set(plain) <= set(allowed)
    assert set(completed(replica, return_token_ids=True, allowed_token_ids=allowed)["token_ids"]) <= set(allowed)


def test_bad_words_do_not_come(replica: Replica) -> None:
    ids = completed(replica, return_token_ids=True)["token_ids"]
    tokenizer = replica.model.tokenizer
    word = next(text for one in ids if (text := tokenizer.token_text(one)).isalnum())
    banned = {tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (word, f" {word}")}
    told = completed(replica, return_token_ids=True, bad_words=[word])["token_ids"]
    assert ids != told
    runs = {tuple(told[at : at + size]) for size in {len(one) for one in banned} for at in range(len(told))}
    assert not banned & runs


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_ids_of_prompt_and_answer_are_told_whole_and_streamed(replica: Replica, path: str) -> None:
    is_chat = path.endswith("chat/completions")
    body = {**(CHAT if is_chat else GREEDY), "model": NAME, "n": 2, "return_token_ids": True}
    _, _, whole = replica.call("POST", path, body)
    prompt_ids = replica.prompt_ids(CHAT["messages"] if is_chat else GREEDY["prompt"])
    told = whole["prompt_token_ids"] if is_chat else whole["choices"][1]["prompt_token_ids"]
    assert told == prompt_ids
    answers = [choice["token_ids"] for choice in whole["choices"]]
    text = whole["choices"][0]["message"]["content"] if is_chat else whole["choices"][0]["text"]
    assert replica.model.tokenizer.decode(answers[0]) == text
    stream: Any = (replica.openai.chat if is_chat else replica.openai).completions
    asked = {name: value for name, value in body.items() if name != "return_token_ids"}
    chunks = list(stream.create(stream=True, extra_body={"return_token_ids": True}, **asked))
    for index in range(2):
        own = [one for chunk in chunks for one in chunk.choices if one.index == index]
        assert [i for one in own for i in getattr(one, "token_ids", None) or ()] == answers[index]
    holders = chunks if is_chat else [one for chunk in chunks for one in chunk.choices if one.index == 1]
    assert [ids for one in holders if (ids := getattr(one, "prompt_token_ids", None))] == [prompt_ids]


def test_tokens_of_log_probabilities_are_named_by_their_ids_where_that_is_asked_for(replica: Replica) -> None:
    named: Any = {"return_tokens_as_token_ids": True}
    found = completed(replica, logprobs=1, echo=True, return_token_ids=True, **named)
    names = [f"token_id:{one}" for one in (*found["prompt_token_ids"], *found["token_ids"])]
    assert found["logprobs"]["tokens"] == names[: len(found["logprobs"]["tokens"])]
    assert [next(iter(top)) for top in found["logprobs"]["top_logprobs"][1:]] == names[1 : len(names)]
    stream = replica.openai.chat.completions.create(model=NAME, logprobs=True, stream=True, extra_body=named, **CHAT)
    told = [one.token for chunk in stream for one in (chunk.choices[0].logprobs or Unscored).content or ()]
    assert told
    assert all(name.startswith("token_id:") for name in told)


class Unscored:
    content = None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [99999]}, "allowed_token_ids"),
        ({"allowed_token_ids": [5], "bad_words": ["a"]}, "bad_words"),
        ({"allowed_token_ids": [5], "guided_choice": ["a"]}, "allowed_token_ids"),
        ({"allowed_token_ids": [2], "min_tokens": 3}, "allowed_token_ids"),
        ({"bad_words": ["a"], "guided_choice": ["a"]}, "bad_words"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"suffix": "the end"}, "suffix"),
    ],
)
def test_what_leaves_nothing_or_does_not_exist_is_named(replica: Replica, fields: Any, param: str) -> None:
    status, _, found = replica.call("POST", "/v1/completions", GREEDY | fields)
    assert (status, found["error"]["param"]) == (400, param)
