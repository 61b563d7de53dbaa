"""Texts and chats as token ids, and back, as vLLM's clients ask for it."""

from typing import Any

import pytest

from tests.server.replica import NAME, Replica

CHAT: Any = [{"role": "user", "content": "What is it?"}]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_a_prompt_becomes_the_ids_that_a_completion_would_see(replica: Replica, path: str) -> None:
    status, _, found = replica.call("POST", path, {"prompt": "hello there"})
    ids = replica.prompt_ids("hello there")
    assert status == 200
    assert found == {"count": len(ids), "max_model_len": replica.model.max_model_len, "tokens": ids, "token_strs": None}


def test_tokens_are_told_as_the_vocabulary_spells_them(replica: Replica) -> None:
    _, _, found = replica.post("/tokenize", prompt="a word", return_token_strs=True)
    assert found["token_strs"] == [replica.model.tokenizer.vocabulary_text(one) for one in found["tokens"]]
    assert any(text.startswith("Ġ") for text in found["token_strs"]), "a space is the vocabulary's own mark"


def test_a_chat_becomes_its_prompt(replica: Replica) -> None:
    _, _, found = replica.post("/tokenize", messages=CHAT)
    assert found["tokens"] == replica.prompt_ids(CHAT)
    _, _, closed = replica.post("/tokenize", messages=CHAT, add_generation_prompt=False)
    assert found["tokens"][: closed["count"]] == closed["tokens"] != found["tokens"]


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
def test_ids_become_their_text_special_tokens_included(replica: Replica, path: str) -> None:
    ids = replica.prompt_ids(CHAT)
    status, _, found = replica.call("POST", path, {"model": NAME, "tokens": ids})
    assert (status, found) == (200, {"prompt": replica.model.chat_template.render(CHAT)})
    assert replica.call("POST", path, {"tokens": []})[2] == {"prompt": ""}


def test_a_chat_is_rendered_as_it_would_be_answered(replica: Replica) -> None:
    body: Any = {"messages": CHAT, "max_tokens": 5, "stream": True}
    status, _, found = replica.post("/v1/chat/completions/render", **body)
    assert status == 200
    assert found == {
        "model": NAME,
        "prompt": replica.model.chat_template.render(CHAT),
        "token_ids": replica.prompt_ids(CHAT),
    }
    _, _, cut = replica.post("/v1/chat/completions/render", truncate_prompt_tokens=3, **body)
    assert cut["token_ids"] == found["token_ids"][-3:]
    assert cut["prompt"] == replica.model.tokenizer.decode(cut["token_ids"], skip_special_tokens=False)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, 400, "add_generation_prompt"),
        ("/tokenize", {"messages": CHAT, "chat_template": "{{ 1 }}"}, 400, "chat_template"),
        ("/tokenize", {"messages": CHAT, "continue_final_message": True}, 400, "continue_final_message"),
        ("/tokenize", {"prompt": "a", "model": "another"}, 404, "model"),
        ("/detokenize", {"tokens": [1, 99999]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "model": "another"}, 404, "model"),
        ("/v1/chat/completions/render", {"model": NAME, "messages": CHAT, "audio": {}}, 400, "audio"),
        ("/v1/chat/completions/render", {"model": "another", "messages": CHAT}, 404, "model"),
    ],
)
def test_what_is_wrong_is_named(replica: Replica, path: str, body: Any, status: int, param: str) -> None:
    found, _, said = replica.call("POST", path, body)
    assert (found, said["error"]["param"]) == (status, param)


def test_a_prompt_that_the_context_cannot_hold_is_still_tokenized_and_one_of_many_contexts_refused(
    replica: Replica,
) -> None:
    limit = replica.model.max_model_len
    status, _, found = replica.post("/tokenize", prompt="word " * limit)
    assert (status, found["count"] > limit) == (200, True)
    longest = replica.model.tokenizer.max_token_bytes
    assert longest is not None
    status, _, said = replica.post("/tokenize", prompt="a" * (5 * limit * longest))
    assert (status, said["error"]["code"]) == (400, "context_length_exceeded")
