"""The names of a prompt's blocks at the gateway are those that its replica publishes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.hashing import cache_namespace, routing_hashes
from penstock.gateway.tokens import prompt_tokenizer as lexicons
from penstock.gateway.tokens.prompt_tokenizer import CHAT, COMPLETION, MESSAGES
from tests.examples import examples
from tests.gateway.lexicons import prompt_tokenizer, tokenizer
from tests.gateway.tokens.test_prompt_tokenizer import KINDS, MESSAGE, encoded, rendered

WORDS = "the words of a long turn about many things "


@settings(max_examples=examples(25))
@given(KINDS, st.lists(MESSAGE, min_size=1, max_size=6), st.sampled_from(["", "acme"]), st.sampled_from([None, "salt"]))
def test_a_chats_names_are_those_of_its_ids_in_the_tenants_namespace(
    kind: str, messages: list[dict[str, str]], tenant: str, salt: str | None
) -> None:
    messages = [*messages, {"role": "user", "content": WORDS * 40}]
    ids = tokenizer(kind).encode(rendered(messages), add_special_tokens=False)
    body = encoded({"messages": messages} | ({"cache_salt": salt} if salt else {}), False)
    found = prompt_tokenizer(kind).names(CHAT, body, tenant)
    assert found.num_tokens == len(ids)
    assert [*map(int, found.ids.split(b","))] == ids
    assert list(found.hashes) == routing_hashes(cache_namespace(tenant, salt or ""), ids)
    assert prompt_tokenizer(kind).known_names(CHAT, body, tenant) == found
    assert prompt_tokenizer(kind).known_names(CHAT, body, tenant + "x") is None


@settings(max_examples=examples(20))
@given(KINDS, st.lists(MESSAGE, min_size=2, max_size=12), st.data())
def test_a_conversation_named_turn_by_turn_is_named_right(
    kind: str, messages: list[dict[str, str]], data: st.DataObject
) -> None:
    """With all texts taken for long ones, so that every turn starts from the one before."""
    messages = [{**one, "content": one["content"] + WORDS * data.draw(st.integers(0, 30))} for one in messages]
    original, lexicons._LONG = lexicons._LONG, 1
    try:
        for end in sorted(data.draw(st.lists(st.integers(1, len(messages)), min_size=1, max_size=5))):
            ids = tokenizer(kind).encode(rendered(messages[:end]), add_special_tokens=False)
            for tenant in ("", "acme"):
                found = prompt_tokenizer(kind).names(CHAT, encoded({"messages": messages[:end]}, False), tenant)
                assert list(found.hashes) == routing_hashes(cache_namespace(tenant, ""), ids)
                assert [*map(int, found.ids.split(b","))] == ids
    finally:
        lexicons._LONG = original


def test_completions_by_text_and_by_ids_and_messages_are_named_too() -> None:
    found, text = prompt_tokenizer(), WORDS * 40
    ids = tokenizer("byte_level").encode(text, add_special_tokens=True)
    names = routing_hashes("", ids)
    assert names
    assert list(found.names(COMPLETION, encoded({"prompt": text}, True), "").hashes) == names
    assert list(found.names(COMPLETION, encoded({"prompt": ids}, True), "").hashes) == names
    cut = found.names(COMPLETION, encoded({"prompt": ids, "truncate_prompt_tokens": 300}, True), "")
    assert (cut.num_tokens, list(cut.hashes)) == (300, routing_hashes("", ids[-300:]))
    several = found.names(COMPLETION, encoded({"prompt": [text, text]}, True), "")
    assert (several.num_tokens, several.hashes) == (2 * len(ids), ())
    chat = {"messages": [{"role": "user", "content": text}]}
    assert found.names(MESSAGES, encoded(chat | {"max_tokens": 5}, True), "") == found.names(
        CHAT, encoded(chat, True), ""
    )
