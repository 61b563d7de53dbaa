"""Whole answers, read with the official client's own models."""

import json
import math

from openai.types import Completion
from openai.types.chat import ChatCompletion

from penstock.api.openai import Choice, ResponseHead, ScoredToken, Usage, chat_completion, new_id, text_completion
from penstock.api.openai.responses import completion_logprobs
from penstock.core.request import FinishReason

HEAD = ResponseHead(id="x-1", model="m", created=1_700_000_000)
HELLO = ScoredToken(" hé", " hé".encode(), -0.5, top=[ScoredToken(" hé", " hé".encode(), -0.5)])
HALF = ScoredToken("\ufffd", b"\xf0\x9f", -math.inf, top=[ScoredToken("a", b"a", -1.0)])
CHOICES = [
    Choice(0, " hé…", FinishReason.STOP, logprobs=[HELLO, HALF]),
    Choice(1, "", FinishReason.LENGTH),
]


def test_a_chat_completion_is_what_the_client_expects() -> None:
    answer = ChatCompletion.model_validate_json(chat_completion(HEAD, CHOICES, Usage.of(10, 5, cached_tokens=4)))
    assert (answer.id, answer.model, answer.created, answer.system_fingerprint) == ("x-1", "m", 1_700_000_000, None)
    assert [choice.message.content for choice in answer.choices] == [" hé…", ""]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length"]
    assert answer.usage is not None
    assert answer.usage.total_tokens == 15
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert answer.choices[1].logprobs is None


def test_chat_logprobs_show_bytes_and_never_infinity() -> None:
    answer = ChatCompletion.model_validate_json(chat_completion(HEAD, CHOICES, Usage.of(1, 1)))
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    hello, half = logprobs.content
    assert bytes(hello.bytes or []) == " hé".encode()
    assert [(top.token, top.logprob) for top in hello.top_logprobs] == [(" hé", -0.5)]
    assert half.logprob == -9999.0
    assert half.bytes == [0xF0, 0x9F]


def test_a_text_completion_is_what_the_client_expects() -> None:
    answer = Completion.model_validate_json(text_completion(HEAD, CHOICES, Usage.of(10, 5)))
    assert [choice.text for choice in answer.choices] == [" hé…", ""]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length"]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == [" hé", "bytes:\\xf0\\x9f"]
    assert logprobs.token_logprobs == [-0.5, -9999.0]
    assert logprobs.text_offset == [0, 3]
    assert logprobs.top_logprobs == [{" hé": -0.5}, {"a": -1.0, "bytes:\\xf0\\x9f": -9999.0}]


def test_parts_of_a_character_begin_where_it_does_and_are_told_apart() -> None:
    text = "a🙂b\ufffd"
    raws = [b"a", b"\xf0\x9f", b"\x99", b"\x82b", "\ufffd".encode()]
    tokens = [ScoredToken(raw.decode(errors="replace"), raw, -1.0, [scored(b"\xf0"), scored(b"\xf1")]) for raw in raws]
    found = completion_logprobs(tokens)
    assert found["text_offset"] == [0, 1, 1, 1, 3]
    assert all(offset <= len(text) for offset in found["text_offset"])
    assert found["tokens"] == ["a", "bytes:\\xf0\\x9f", "bytes:\\x99", "bytes:\\x82\\x62", "\ufffd"]
    assert {"bytes:\\xf0", "bytes:\\xf1"} <= found["top_logprobs"][0].keys()


def scored(raw: bytes) -> ScoredToken:
    return ScoredToken(raw.decode(errors="replace"), raw, -2.0)


def test_offsets_pass_over_tokens_that_are_not_shown_and_stay_inside_a_text_that_a_stop_string_cut() -> None:
    hidden = ScoredToken("<s>", b"<s>", -1.0, is_shown=False)
    tokens = [hidden, scored(b"ab"), hidden, scored(b"c"), scored(b"the end"), scored(b"!")]
    assert completion_logprobs(tokens)["text_offset"] == [0, 0, 2, 2, 3, 10]
    choice = Choice(0, "abc", FinishReason.STOP, tokens)
    answer = json.loads(text_completion(HEAD, [choice], Usage.of(1, 6)))
    assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 0, 2, 2, 3, 3]


def test_ids_are_of_their_kind_and_never_repeat() -> None:
    assert new_id("chatcmpl").startswith("chatcmpl-")
    assert len({new_id("cmpl") for _ in range(1000)}) == 1000
