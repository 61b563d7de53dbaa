"""Log probabilities of prompts, told with an echo and by vLLM's name; and the best of several answers."""

from typing import Any

import openai
import pytest

from penstock.engine.fake_embedder import fake_score
from tests.server.replica import NAME, Replica

GREEDY: Any = {"model": NAME, "temperature": 0}
PROMPT = "a prompt, é and 漢字 in it"


def test_an_echo_with_logprobs_scores_the_prompt_too(replica: Replica) -> None:
    answer = replica.openai.completions.create(prompt=PROMPT, max_tokens=3, echo=True, logprobs=2, **GREEDY)
    (choice,) = answer.choices
    ids, tokenizer = replica.prompt_ids(PROMPT), replica.model.tokenizer
    assert choice.text == PROMPT + replica.answer(PROMPT, 3)
    found = choice.logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    assert found.text_offset is not None
    num = len(ids)
    assert (
        len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == num + 3
    )
    assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None), "nothing tells the first"
    expected = [fake_score(ids, at, 2) for at in range(1, num)]
    assert found.token_logprobs[1:num] == pytest.approx([one.logprob for one in expected])
    for top, one in zip(found.top_logprobs[1:num], expected, strict=True):
        assert len(top) >= 2
        assert {value for _, value in one.top} <= set(top.values())
    assert found.text_offset[num] == len(PROMPT), "the answer begins where the prompt ends"
    assert max(found.text_offset) < len(choice.text)
    for token_id, offset in zip(ids, found.text_offset, strict=False):
        text = tokenizer.token_text(token_id)
        assert "\ufffd" in text or PROMPT[offset:].startswith(text)


def test_a_streamed_echo_says_the_same(replica: Replica) -> None:
    asked: Any = {"prompt": [PROMPT, "another"], "max_tokens": 3, "echo": True, "logprobs": 1, "n": 2} | GREEDY
    whole = replica.openai.completions.create(**asked)
    chunks = list(replica.openai.completions.create(stream=True, **asked))
    for choice in whole.choices:
        own = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert "".join(one.text for one in own) == choice.text
        assert choice.logprobs is not None
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            parts = [getattr(one.logprobs, name) for one in own if one.logprobs is not None]
            assert [value for part in parts for value in part] == getattr(choice.logprobs, name), name


def test_prompt_logprobs_are_told_by_id(replica: Replica) -> None:
    _, _, found = replica.post("/v1/completions", prompt=[PROMPT, "x"], max_tokens=2, prompt_logprobs=1, temperature=0)
    ids = replica.prompt_ids(PROMPT)
    first, second = (choice["prompt_logprobs"] for choice in found["choices"])
    assert (len(first), first[0], len(second)) == (len(ids), None, len(replica.prompt_ids("x")))
    for at, told in enumerate(first[1:], 1):
        own = fake_score(ids, at, 1)
        text = replica.model.tokenizer.token_text(ids[at])
        assert told[str(ids[at])] == {"logprob": own.logprob, "rank": own.rank, "decoded_token": text}
        assert told.keys() == {str(ids[at]), str(own.top[0][0])}
    assert found["choices"][0]["logprobs"] is None


def test_a_chats_prompt_logprobs_stand_beside_its_choices(replica: Replica) -> None:
    messages: Any = [{"role": "user", "content": "What?"}]
    body: Any = {"messages": messages, "max_tokens": 2, "n": 2, "prompt_logprobs": 0}
    _, _, found = replica.post("/v1/chat/completions", **body)
    assert [list(one) for one in found["prompt_logprobs"][1:]] == [[str(i)] for i in replica.prompt_ids(messages)[1:]]
    assert replica.post("/v1/chat/completions", messages=messages, max_tokens=2)[2]["prompt_logprobs"] is None


def test_prompts_with_too_many_log_probabilities_are_refused(replica: Replica) -> None:
    prompt = [[5] * (replica.model.max_model_len // 2)] * 300
    with pytest.raises(openai.BadRequestError, match="more than 1048576 log probabilities"):
        replica.openai.completions.create(model=NAME, prompt=prompt, max_tokens=1, echo=True, logprobs=20)


def test_the_best_of_several_answers_are_shown_and_all_are_counted(replica: Replica) -> None:
    asked: Any = {"model": NAME, "prompt": ["one", "two"], "max_tokens": 4, "seed": 3}
    every = replica.openai.completions.create(n=4, logprobs=0, **asked)
    best = replica.openai.completions.create(n=2, best_of=4, **asked)
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is None for choice in best.choices)

    def mean(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    for prompt in range(2):
        ranked = sorted(every.choices[4 * prompt : 4 * prompt + 4], key=mean, reverse=True)
        shown = best.choices[2 * prompt : 2 * prompt + 2]
        assert [choice.text for choice in shown] == [choice.text for choice in ranked[:2]]
    assert best.usage is not None
    assert every.usage is not None
    assert best.usage.completion_tokens == every.usage.completion_tokens
    told = replica.openai.completions.create(best_of=4, logprobs=1, **asked)
    assert all(choice.logprobs is not None for choice in told.choices)
