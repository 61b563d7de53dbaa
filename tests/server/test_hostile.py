"""No request holds up everybody else's: the longest pause of the server's event loop, whatever one client sends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hostile import CHAT, COMPLETIONS, CORPUS, EMBEDDINGS, RERANK, SCORE, Hostile
from tests.images.hostile import SEEING
from tests.loop_pauses import without_pauses
from tests.server.replica import NAME, Replica, serving
from tests.server.seeing import seeing

_IN_A_GUIDE_PROCESS = {"chat: a regular expression"}  # which has limits of its own, and seconds


@pytest.fixture(scope="module")
def embedding_replica() -> Iterator[Replica]:
    """A model that compares vectors, and does not judge texts by how likely they are."""
    with serving(generates=False) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("hostile", [one for one in CORPUS if one.name not in _IN_A_GUIDE_PROCESS], ids=str)
def test_a_hostile_request_does_not_stop_the_loop(replica: Replica, hostile: Hostile) -> None:
    body = hostile.build(NAME)
    assert len(body) <= 8 << 20
    status, _, _ = without_pauses(replica.loop, lambda: replica.call("POST", hostile.path, body))
    assert status in (200, 400, 404)


@pytest.mark.slow
@pytest.mark.parametrize("hostile", [one for one in CORPUS if one.path in (EMBEDDINGS, RERANK, SCORE)], ids=str)
def test_nor_does_one_to_a_model_that_only_embeds(embedding_replica: Replica, hostile: Hostile) -> None:
    body, loop = hostile.build(NAME), embedding_replica.loop
    status, _, _ = without_pauses(loop, lambda: embedding_replica.call("POST", hostile.path, body))
    assert status in (200, 400, 404)


@pytest.fixture(scope="module")
def seeing_replica() -> Iterator[Replica]:
    with seeing() as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("hostile", SEEING, ids=str)
def test_nor_does_one_that_shows_images(seeing_replica: Replica, hostile: Hostile) -> None:
    body = hostile.build(NAME)
    assert len(body) <= 8 << 20
    status, _, _ = without_pauses(seeing_replica.loop, lambda: seeing_replica.call("POST", hostile.path, body))
    assert status in (200, 400)


def test_a_prompt_that_cannot_fit_is_refused_without_being_tokenized(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = replica.model.tokenizer.max_token_bytes
    assert longest is not None
    text = "a " * (2 * longest * replica.model.max_model_len)
    monkeypatch.setattr(type(replica.model.tokenizer), "encode_batch", None)
    monkeypatch.setattr(type(replica.model.tokenizer), "count", None)
    chat = {"messages": [{"role": "user", "content": text}]}
    asked = {
        COMPLETIONS: {"prompt": text},
        CHAT: chat,
        "/v1/messages": chat | {"max_tokens": 1},
        "/v1/messages/count_tokens": chat,
        EMBEDDINGS: {"input": text},
        RERANK: {"query": text, "documents": ["d"]},
        SCORE: {"text_1": text, "text_2": "d"},
    }
    for path, fields in asked.items():
        status, _, answer = replica.post(path, **fields)
        assert (status, "at least" in answer["error"]["message"]) == (400, True), path
    status, _, answer = replica.post(COMPLETIONS, prompt=text + text, truncate_prompt_tokens=1)
    assert (status, "at least" in answer["error"]["message"]) == (400, True)


def test_texts_that_are_too_many_together_are_refused_before_they_are_joined(replica: Replica) -> None:
    status, _, answer = replica.post(RERANK, query="q" * 1500, documents=["d"] * 1000)
    assert status == 400
    assert "1048576" in answer["error"]["message"]


def test_choices_share_one_prompt_and_are_bounded_before_they_are_built(replica: Replica) -> None:
    status, _, answer = replica.post(COMPLETIONS, prompt=["a"] * 1000, max_tokens=1)
    assert (status, "at most 512" in answer["error"]["message"]) == (400, True)
    biases = {str(token): 1 for token in range(2000)}
    status, _, answer = replica.post(COMPLETIONS, prompt="a", logit_bias=biases)
    assert (status, answer["error"]["param"]) == (400, "logit_bias")


def test_an_error_repeats_little_of_a_long_name(replica: Replica) -> None:
    _, _, answer = replica.call("POST", COMPLETIONS, {"model": "m" * 10_000, "prompt": "a"})
    assert len(answer["error"]["message"]) < 400
