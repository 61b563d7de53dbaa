"""Chunks, read with the official client's own models; and what they cost."""

import json
import timeit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from penstock.api.openai import ChatChunks, CompletionChunks, ResponseHead, ScoredToken, Usage
from penstock.core.request import FinishReason

HEAD = ResponseHead(id="x-1", model='odd "model"\\ %d %b', created=1_700_000_000)
TOKEN = ScoredToken("hé", "hé".encode(), -0.5)


def test_a_chat_stream_is_what_the_client_expects() -> None:
    chunks = ChatChunks(HEAD)
    sent = [chunks.start(1), chunks.text(1, "hé"), chunks.finish(1, FinishReason.LENGTH)]
    read = [ChatCompletionChunk.model_validate_json(chunk or b"") for chunk in sent]
    assert all((chunk.id, chunk.model, chunk.created) == (HEAD.id, HEAD.model, HEAD.created) for chunk in read)
    choices = [chunk.choices[0] for chunk in read]
    assert [choice.index for choice in choices] == [1, 1, 1]
    assert [choice.delta.role for choice in choices] == ["assistant", None, None]
    assert [choice.delta.content for choice in choices] == ["", "hé", None]
    assert [choice.finish_reason for choice in choices] == [None, None, "length"]


def test_a_completion_stream_is_what_the_client_expects() -> None:
    chunks = CompletionChunks(HEAD)
    assert chunks.start(0) is None
    # The client's model wants a finish reason, which a chunk has not; it builds one without validation, as here.
    text = Completion.construct(**json.loads(chunks.text(2, "hé")))
    assert (text.object, text.model) == ("text_completion", HEAD.model)
    choice = text.choices[0]
    assert (choice.index, choice.text, choice.logprobs) == (2, "hé", None)
    assert choice.finish_reason is None
    end = Completion.model_validate_json(chunks.finish(2, FinishReason.STOP))
    assert (end.choices[0].text, end.choices[0].finish_reason) == ("", "stop")


@pytest.mark.parametrize("kind", [ChatChunks, CompletionChunks])
def test_usage_comes_last_and_is_null_until_then(kind: type[ChatChunks] | type[CompletionChunks]) -> None:
    chunks = kind(HEAD, include_usage=True)
    for chunk in (chunks.text(0, "a"), chunks.finish(0, FinishReason.STOP)):
        assert json.loads(chunk)["usage"] is None
    last = json.loads(chunks.usage(Usage.of(3, 2)))
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert "usage" not in json.loads(kind(HEAD).text(0, "a"))


def test_a_chunk_before_the_first_text_has_no_tokens_of_output_yet() -> None:
    start = ChatChunks(HEAD, include_usage=True, usage_now=lambda: Usage.of(3, 2, 1)).start(0)
    usage = json.loads(start)["usage"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (0, 3)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}


def test_chat_logprobs_travel_with_their_text() -> None:
    chunk = ChatCompletionChunk.model_validate_json(ChatChunks(HEAD).text(0, "hé", [TOKEN]))
    logprobs = chunk.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.content[0].token == "hé"


def test_text_offsets_go_on_from_chunk_to_chunk_for_each_choice() -> None:
    chunks = CompletionChunks(HEAD)
    offsets = [
        json.loads(chunks.text(index, "…", [TOKEN, TOKEN]))["choices"][0]["logprobs"]["text_offset"]
        for index in (0, 1, 0)
    ]
    assert offsets == [[0, 2], [0, 2], [4, 6]]


@given(st.text(), st.integers(0, 127))
def test_any_text_survives(text: str, index: int) -> None:
    chat = json.loads(ChatChunks(HEAD).text(index, text))["choices"][0]
    completion = json.loads(CompletionChunks(HEAD).text(index, text))["choices"][0]
    assert (chat["delta"]["content"], completion["text"]) == (text, text)
    assert b"\n" not in ChatChunks(HEAD).text(index, text)


@pytest.mark.slow
@pytest.mark.drill
def test_a_content_chunk_costs_microseconds() -> None:
    chunks = ChatChunks(HEAD)
    best_s = min(timeit.repeat(lambda: chunks.text(0, " hello"), number=2000, repeat=5)) / 2000
    assert best_s < 3e-6
