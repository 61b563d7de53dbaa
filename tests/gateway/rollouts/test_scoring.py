"""Scores of one answer by penstock replicas, as both versions of a rollout are asked for them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.gateway.rollouts.comparisons import _difference, _scored, _scores, _verdict
from tests.server.replica import NAME, Replica

MESSAGES = [{"role": "user", "content": "the first and the second"}]


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", {"messages": MESSAGES}), ("/v1/completions", {"prompt": "the first "})]
)
def test_a_replica_scores_an_answer_behind_its_prompt(
    replica_at_hand: Replica, path: str, body: dict[str, Any]
) -> None:
    status, _, answer = replica_at_hand.post(path, **body, max_tokens=6, temperature=0)
    assert status == 200
    choice, prompt = answer["choices"][0], answer["usage"]["prompt_tokens"]
    text = choice["text"] if "prompt" in body else choice["message"]["content"]
    fields = _scored(path.encode(), json.dumps({"model": NAME, **body}).encode(), text)
    assert fields is not None
    status, _, found = replica_at_hand.post(path, **fields)
    assert (status, found.get("error")) == (200, None)
    scores = _scores(found)
    assert scores is not None
    assert prompt < len(scores) == found["usage"]["prompt_tokens"]
    assert all(score is not None and score[1] <= 0 for score in scores[prompt:])
    assert _difference(scores, scores, prompt) == 0.0
    moved = [None if score is None else (score[0], score[1] - 0.25) for score in scores]
    assert _difference(scores, moved, prompt) == pytest.approx(0.25)
    other = [None if score is None else ("other", score[1]) for score in scores]
    assert _difference(scores, other, prompt) is None
    assert _difference(scores, scores[:-1], prompt) is None


@pytest.mark.parametrize(
    ("said", "verdict"),
    [("A", "A"), (" b.", "B"), ("Tie", "tie"), ("**B**", "B"), ("A, because", "A"), ("Answer A", None), ("", None)],
)
def test_a_judges_word_is_understood_or_left_out(said: str, verdict: str | None) -> None:
    assert _verdict({"choices": [{"message": {"content": said}}]}) == verdict
    assert _verdict({"choices": []}) is None
