"""A gateway's counts: never more than the bound, and equal to what the replica's own tokenizer makes."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.api.tokenizer_bundle import TokenizerBundle
from penstock.core.errors import ContextLengthExceeded, InvalidRequest
from penstock.core.replica import UNBOUNDED
from penstock.gateway.tokens import prompt_tokenizer as lexicons
from penstock.gateway.tokens.memo import Memo
from penstock.gateway.tokens.prompt_tokenizer import CHAT, COMPLETION, EMBEDDINGS, MESSAGES, RESPONSES
from penstock.gateway.tokens.request_size import TERSE_BYTES
from penstock.hub.resolve import resolve
from penstock.text.tokenizer import Tokenizer
from tests.examples import examples
from tests.gateway.lexicons import CHATML, TOKENIZERS, prompt_tokenizer, tokenizer

TRICKY = ["", " ", "<s>", "</s>", "<think>", "\n", "ﷺ", "क़", "שּׁ", "𝅘𝅥𝅯", "🙂", "12345", "a b", '"', "\\", "\x00"]
TEXTS = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(TRICKY), max_size=12).map("".join))
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "developer"])
MESSAGE = st.fixed_dictionaries({"role": ROLES, "content": TEXTS})
KINDS = st.sampled_from(list(TOKENIZERS))


def encoded(body: dict[str, Any], ascii_only: bool) -> bytes:
    return json.dumps({"model": "m", **body}, ensure_ascii=ascii_only, separators=(",", ":")).encode(
        errors="surrogatepass"
    )


def rendered(messages: list[dict[str, str]]) -> str:
    roles = {"developer": "system"}
    turns = [f"<s>{roles.get(m['role'], m['role'])}\n{m['content']}</s>\n" for m in messages]
    return "".join(turns) + "<s>assistant\n"


@settings(max_examples=examples(60))
@given(KINDS, st.sampled_from(["chatml", "wordy"]), st.lists(MESSAGE, min_size=1, max_size=8), st.booleans())
def test_a_chat_has_at_most_as_many_tokens_as_its_bound(
    kind: str, template: str, messages: list[dict[str, str]], ascii_only: bool
) -> None:
    found, body = prompt_tokenizer(kind, template), encoded({"messages": messages}, ascii_only)
    assert found.count(CHAT, body) <= found.bound(body)


SAID = st.fixed_dictionaries({"role": ROLES.filter(lambda role: role != "tool"), "content": TEXTS})


@settings(max_examples=examples(60))
@given(KINDS, st.sampled_from(["chatml", "wordy"]), st.one_of(TEXTS, st.lists(SAID, max_size=8)), TEXTS, st.booleans())
def test_a_response_has_at_most_as_many_tokens_as_its_bound(
    kind: str, template: str, said: Any, instructions: str, ascii_only: bool
) -> None:
    found = prompt_tokenizer(kind, template)
    body = encoded({"input": said or "?"} | ({"instructions": instructions} if instructions else {}), ascii_only)
    assert found.count(RESPONSES, body) <= found.bound(body) + TERSE_BYTES


def test_a_response_is_counted_and_named_as_the_chat_that_it_is() -> None:
    found, words = prompt_tokenizer(), "and so on " * 200
    turns = [
        {"role": "user", "content": words},
        {"role": "assistant", "content": words},
        {"role": "user", "content": "?"},
    ]
    chat = encoded({"messages": [{"role": "system", "content": "Be brief."}, *turns]}, True)
    response = encoded({"input": turns, "instructions": "Be brief."}, True)
    assert found.count(RESPONSES, response) == found.count(CHAT, chat)
    assert found.names(RESPONSES, response, "acme") == found.names(CHAT, chat, "acme")
    assert found.names(CHAT, chat, "acme").hashes


def test_calls_in_a_response_leave_its_prompt_unbounded() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    assert prompt_tokenizer().bound(encoded({"input": [call]}, True)) == UNBOUNDED


@settings(max_examples=examples(60))
@given(KINDS, st.one_of(TEXTS, st.lists(TEXTS, min_size=1, max_size=8)), st.booleans())
def test_prompts_have_at_most_as_many_tokens_as_their_bound(kind: str, prompt: Any, ascii_only: bool) -> None:
    found, body = prompt_tokenizer(kind), encoded({"prompt": prompt}, ascii_only)
    count = found.count(COMPLETION, body)
    prompts = [prompt] if isinstance(prompt, str) else prompt
    assert count == sum(max(1, len(tokenizer(kind).encode(one, add_special_tokens=True))) for one in prompts)
    assert count <= found.bound(body)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("template", ["chatml", "wordy"])
def test_many_tiny_messages_are_bounded_too(kind: str, template: str) -> None:
    for content in ("", "x", "<s>", "7"):
        body = encoded({"messages": [{"role": "user", "content": content}] * 500}, False)
        assert prompt_tokenizer(kind, template).count(CHAT, body) <= prompt_tokenizer(kind, template).bound(body)


@pytest.mark.parametrize("template", ["echoing", "chatty"])
def test_a_template_that_says_more_than_it_is_told_has_no_bound(template: str) -> None:
    assert prompt_tokenizer("byte_level", template).bound(b"{}") >= UNBOUNDED


@settings(max_examples=examples(40))
@given(KINDS, st.lists(MESSAGE, min_size=1, max_size=8))
def test_a_chat_is_counted_as_it_is_encoded(kind: str, messages: list[dict[str, str]]) -> None:
    ids = tokenizer(kind).encode(rendered(messages), add_special_tokens=False)
    assert prompt_tokenizer(kind).count(CHAT, encoded({"messages": messages}, False)) == len(ids)


@settings(max_examples=examples(25))
@given(KINDS, st.lists(MESSAGE, min_size=2, max_size=30), st.data())
def test_a_conversation_counted_turn_by_turn_is_counted_right(
    kind: str, messages: list[dict[str, str]], data: st.DataObject
) -> None:
    """With all texts taken for long ones, so that every turn starts from the one before."""
    found = prompt_tokenizer(kind)
    original, lexicons._LONG = lexicons._LONG, 1
    try:
        for end in sorted(data.draw(st.lists(st.integers(1, len(messages)), min_size=1, max_size=5))):
            ids = tokenizer(kind).encode(rendered(messages[:end]), add_special_tokens=False)
            assert found._count_text(rendered(messages[:end])) == len(ids)
    finally:
        lexicons._LONG = original


def test_a_turn_more_costs_only_that_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    found = prompt_tokenizer()
    turns = [{"role": "user", "content": f"{index} " + "the words of a turn " * 100} for index in range(20)]
    found.count(CHAT, encoded({"messages": turns[:-1]}, False))
    counted: list[str] = []
    count = found._tokenizer.count

    def recording(texts: list[str], **options: bool) -> list[int]:
        counted.extend(texts)
        return count(texts, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(found._tokenizer, "count", recording)
    found.count(CHAT, encoded({"messages": turns}, False))
    assert sum(map(len, counted)) < 1.1 * len(rendered(turns[-1:]))


def test_what_one_tenant_sent_is_remembered_for_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters that are tokenized tell: remembered ones are not, and take no time."""
    found = prompt_tokenizer()
    tokenized: list[str] = []
    count, encode, encode_batch = found._tokenizer.count, found._tokenizer.encode, found._tokenizer.encode_batch

    def recorded(function: Any) -> Any:
        def call(texts: str | list[str], **options: bool) -> Any:
            tokenized.extend([texts] if isinstance(texts, str) else texts)
            return function(texts, **options)

        return call

    for name, function in (("count", count), ("encode", encode), ("encode_batch", encode_batch)):
        monkeypatch.setattr(found._tokenizer, name, recorded(function))

    def cost(ask: Callable[[str], object], tenant: str) -> int:
        tokenized.clear()
        ask(tenant)
        return sum(map(len, tokenized))

    def body(num_turns: int, **more: object) -> bytes:
        turns = [{"role": "user", "content": f"{index} " + "the words of a turn " * 100} for index in range(20)]
        return encoded({"messages": turns[:num_turns], **more}, False)

    completion = encoded({"prompt": "the words of a prompt " * 100}, False)
    embedding = encoded({"input": ["the words of a text " * 100]}, False)
    asks: list[Callable[[str], object]] = [
        lambda tenant: found.count(CHAT, body(19), tenant),
        lambda tenant: found.count(CHAT, body(20), tenant),  # a turn more
        lambda tenant: found.count(CHAT, body(20, cache_salt="s"), tenant),
        lambda tenant: found.names(CHAT, body(19), tenant),
        lambda tenant: found.names(CHAT, body(20), tenant),
        lambda tenant: found.count(COMPLETION, completion, tenant),
        lambda tenant: found.names(COMPLETION, completion, tenant),
        lambda tenant: found.count(EMBEDDINGS, embedding, tenant),
    ]
    victim = [cost(ask, "victim") for ask in asks]
    assert [cost(ask, "thief") for ask in asks] == victim
    assert [cost(ask, "victim") for ask in asks] == [0] * len(asks)  # whose it is finds it again
    assert [cost(ask, "thief") for ask in asks] == [0] * len(asks)
    assert victim[1] < victim[0] / 10  # a conversation that has grown by a turn
    assert victim[2] > victim[0]  # by another salt it is another conversation
    assert found.known_names(CHAT, body(19), "victim") is not None
    assert found.known_names(CHAT, body(19), "") is None


def test_token_ids_count_as_one_each_and_a_cut_prompt_as_what_is_left() -> None:
    found = prompt_tokenizer()
    assert found.count(COMPLETION, encoded({"prompt": [5, 6, 7]}, True)) == 3
    assert found.count(COMPLETION, encoded({"prompt": [[5, 6], [7]]}, True)) == 3
    long = "the words " * 50
    assert found.count(COMPLETION, encoded({"prompt": [long, "x"], "truncate_prompt_tokens": 4}, True)) <= 4 + 2
    body = encoded({"messages": [{"role": "user", "content": long}], "truncate_prompt_tokens": 4}, True)
    assert found.count(CHAT, body) == 4


def test_a_message_request_counts_as_the_chat_it_is() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "the first"}]}, {"role": "user", "content": "x"}]
    body = encoded({"system": "be brief", "max_tokens": 5, "messages": messages}, True)
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the first\nx"}]
    assert prompt_tokenizer().count(MESSAGES, body) == prompt_tokenizer().count(CHAT, encoded({"messages": chat}, True))


def test_what_the_replica_would_refuse_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        prompt_tokenizer().count(CHAT, b'{"model":"m","messages":[{"role":"user"}]}')
    with pytest.raises(InvalidRequest):
        prompt_tokenizer(template=None).count(CHAT, encoded({"messages": [{"role": "user", "content": "x"}]}, True))


def test_what_is_remembered_is_bounded() -> None:
    memo = Memo[int](most=3)
    for number in range(10):
        memo.put("", b"%d" % number, number)
        memo.get("", b"0")
    assert len(memo) == 3
    assert memo.get("", b"9") == 9
    sized = Memo[int](most=10, most_bytes=100)
    for number in range(10):
        sized.put("", b"%d" % (number % 5), number, num_bytes=30)
    assert len(sized) == 3
    sized.put("", b"too large", 1, num_bytes=101)
    assert len(sized) == 0


def test_only_a_token_that_surely_divides_is_taken_for_a_divider() -> None:
    assert tokenizer("byte_level").divider(CHATML) == "<s>"  # also in `</s>`'s place nothing of it stands
    assert tokenizer("byte_level").divider("no token") is None


def test_a_digest_names_what_is_handed_over() -> None:
    assert prompt_tokenizer().digest != prompt_tokenizer(template="wordy").digest


def test_pools_of_one_model_share_its_vocabulary_while_any_uses_it() -> None:
    def made(digest: str) -> lexicons.PromptTokenizer:
        words = tokenizer("byte_level")
        text = TokenizerBundle(words.to_json(), words.special_tokens(), CHATML, words.vocab_size, 1)
        return lexicons.PromptTokenizer(text, digest)

    one, same, other = made("a"), made("a"), made("b")
    assert one._shared is same._shared is not other._shared
    gone = weakref.ref(one._shared)
    del one, same
    assert gone() is None


@pytest.fixture(scope="module")
def real() -> lexicons.PromptTokenizer:
    checkpoint = resolve("smollm2")
    source, words = checkpoint.tokenizer_source, Tokenizer.load(checkpoint.tokenizer_source)
    vocab_size, bos_token_id = checkpoint.config.vocab_size, checkpoint.config.bos_token_id
    text = TokenizerBundle(words.to_json(), words.special_tokens(), source.chat_template, vocab_size, bos_token_id)
    return lexicons.PromptTokenizer(text, "smollm2")


@pytest.mark.slow
@settings(max_examples=examples(80))
@given(st.lists(MESSAGE, min_size=1, max_size=8), st.booleans())
def test_a_real_models_chats_are_bounded(
    real: lexicons.PromptTokenizer, messages: list[dict[str, str]], ascii_only: bool
) -> None:
    body = encoded({"messages": messages}, ascii_only)
    assert real.count(CHAT, body) <= real.bound(body)


@pytest.mark.slow
@settings(max_examples=examples(80))
@given(st.one_of(TEXTS, st.lists(TEXTS, min_size=1, max_size=8)), st.booleans())
def test_a_real_models_prompts_are_bounded(real: lexicons.PromptTokenizer, prompt: Any, ascii_only: bool) -> None:
    body = encoded({"prompt": prompt}, ascii_only)
    assert real.count(COMPLETION, body) <= real.bound(body)


def test_a_text_that_no_context_holds_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    found = prompt_tokenizer()
    monkeypatch.setattr(found, "max_context", 100)
    monkeypatch.setattr(Tokenizer, "count", None)
    monkeypatch.setattr(Tokenizer, "encode_batch", None)
    body = encoded({"messages": [{"role": "user", "content": "ab " * 100_000}]}, True)
    for ask in (lambda: found.count(CHAT, body), lambda: found.names(CHAT, body, "t")):
        with pytest.raises(ContextLengthExceeded):
            ask()


def test_many_texts_are_counted_batch_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lexicons, "_BATCH_CHARS", 20)
    texts = [f"the fox {number}" for number in range(30)]
    ids = tokenizer("byte_level").encode_batch(texts, add_special_tokens=True)
    assert prompt_tokenizer()._lengths(texts) == list(map(len, ids))
    assert prompt_tokenizer()._lengths([]) == []
