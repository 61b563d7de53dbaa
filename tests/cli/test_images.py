"""`penstock serve` of models that take images, and the official clients: answers are those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.cli.real_server import PATIENCE_S, RealServer, real_server
from tests.images.models import FAMILIES, Seeing
from tests.images.samples import data_url, encoded, noise

pytestmark = pytest.mark.slow

TOKENS = 12
ONE, TWO = noise(60, 40, 1), noise(30, 50, 2)
URLS = [data_url(encoded(image)) for image in (ONE, TWO)]


@pytest.fixture(scope="module", params=["smolvlm", "qwen2.5-vl", "qwen3-vl"])
def seeing(request: pytest.FixtureRequest) -> Seeing:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def server(seeing: Seeing, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    directory = seeing.write(tmp_path_factory.mktemp("seeing") / seeing.name)
    with real_server("--dtype", "float32", "--block-size", "16", model=str(directory)) as started:
        yield started


def ask(server: RealServer, content: list[Any], **fields: Any) -> Any:
    return server.openai.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": content}],
        max_tokens=TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
        **fields,
    )


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def shown(number: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": URLS[number]}}


def theirs(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image"} if "image_url" in part else part for part in content]}]


CONTENTS = [
    ([text("What is this?"), shown(0)], [ONE]),
    ([shown(1), text("Describe it.")], [TWO]),
    ([text("First "), shown(0), text(" and then "), shown(1), text(": which?")], [ONE, TWO]),
]


@pytest.mark.parametrize(("content", "images"), CONTENTS, ids=["after", "before", "two"])
def test_answers_are_those_of_transformers(server: RealServer, seeing: Seeing, content: Any, images: Any) -> None:
    expected, prompt = seeing.answer(theirs(content), images, TOKENS)
    answer = ask(server, content)
    assert answer.prompt_token_ids == prompt
    assert answer.choices[0].message.content == expected
    assert answer.usage.prompt_tokens == len(prompt)
    placeholder = seeing.tokenizer.convert_tokens_to_ids(seeing.marks[0])
    assert answer.usage.prompt_tokens_details.image_tokens == prompt.count(placeholder)


def test_a_stream_is_the_same_answer(server: RealServer) -> None:
    content = CONTENTS[2][0]
    whole = ask(server, content).choices[0].message.content
    chunks = list(ask(server, content, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert chunks[-1].usage.prompt_tokens_details.image_tokens > 0


def test_turns_and_other_forms_of_the_same_image(server: RealServer, seeing: Seeing) -> None:
    messages: list[Any] = [
        {"role": "user", "content": [text("Look: "), {"type": "image_url", "image_url": URLS[0]}]},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": "And now?"},
    ]
    placed = [
        {"role": "user", "content": [text("Look: "), {"type": "image"}]},
        {"role": "assistant", "content": [text("I see.")]},
        {"role": "user", "content": [text("And now?")]},
    ]
    answer = server.openai.chat.completions.create(
        model=server.model, messages=messages, max_tokens=TOKENS, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].message.content == seeing.answer(placed, [ONE], TOKENS)[0]


def test_text_alone_is_answered_as_ever(server: RealServer, seeing: Seeing) -> None:
    inputs = seeing.tokenizer.apply_chat_template(
        [{"role": "user", "content": [text("Hello there.")]}], chat_template=seeing.template, add_generation_prompt=True
    )
    answer = ask(server, "Hello there.")  # type: ignore[arg-type]
    assert answer.prompt_token_ids == inputs["input_ids"]
    assert answer.usage.prompt_tokens_details.model_extra == {}


def test_the_same_image_is_found_in_the_cache_and_another_of_its_size_is_not(server: RealServer) -> None:
    head = "The same words before every image, and enough of them for several blocks of the cache. "
    images = [data_url(encoded(noise(60, 40, seed))) for seed in (11, 12)]

    def cached(url: str) -> int:
        answer = ask(server, [text(head), {"type": "image_url", "image_url": {"url": url}}, text("What is it?")])
        return answer.usage.prompt_tokens_details.cached_tokens, answer.usage.prompt_tokens

    first, _ = cached(images[0])
    other, _ = cached(images[1])
    again, num_tokens = cached(images[0])
    assert first <= other < again
    assert again >= num_tokens - 16
    assert other <= num_tokens - 20  # its tiles are its own


def test_anthropics_client(server: RealServer) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE_S)
    data = URLS[0].partition(",")[2]
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    messages: Any = [{"role": "user", "content": [text("What is this?"), image]}]
    told = client.messages.create(
        model=server.model, max_tokens=TOKENS, messages=messages, extra_body={"temperature": 0}
    )
    same = ask(server, CONTENTS[0][0])
    assert told.usage.input_tokens + (told.usage.cache_read_input_tokens or 0) == same.usage.prompt_tokens
    assert same.choices[0].message.content.startswith(told.content[0].text)  # type: ignore[union-attr]
    counted = client.messages.count_tokens(model=server.model, messages=messages)
    assert counted.input_tokens == same.usage.prompt_tokens
    linked: Any = {"type": "image", "source": {"type": "url", "url": URLS[0]}}
    counted = client.messages.count_tokens(
        model=server.model, messages=[{"role": "user", "content": [text("What is this?"), linked]}]
    )
    assert counted.input_tokens == same.usage.prompt_tokens
    result: Any = {"type": "tool_result", "tool_use_id": "t", "content": [text("Here: "), image]}
    call: Any = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    turns: Any = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, text("Well?")]},
    ]
    tools: Any = [{"name": "look", "input_schema": {"type": "object"}}]
    seen = client.messages.create(model=server.model, max_tokens=4, messages=turns, tools=tools)
    assert seen.usage.input_tokens + (seen.usage.cache_read_input_tokens or 0) > counted.input_tokens


def test_responses(server: RealServer) -> None:
    image: Any = {"type": "input_image", "image_url": URLS[0], "detail": "auto"}
    told = server.openai.responses.create(
        model=server.model,
        input=[{"role": "user", "content": [{"type": "input_text", "text": "What is this?"}, image]}],
        max_output_tokens=TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    same = ask(server, CONTENTS[0][0])
    assert told.output_text == same.choices[0].message.content
    assert told.usage is not None
    assert told.usage.input_tokens == same.usage.prompt_tokens
    assert told.usage.input_tokens_details.model_extra == {
        "image_tokens": same.usage.prompt_tokens_details.image_tokens
    }


def test_fewer_tokens_are_spent_on_an_image_of_low_detail(server: RealServer, seeing: Seeing) -> None:
    url = data_url(encoded(noise(60, 40, 21)))
    whole, low = (
        ask(server, [{"type": "image_url", "image_url": {"url": url, "detail": detail}}]).usage.prompt_tokens_details
        for detail in ("high", "low")
    )
    if seeing.name.startswith("qwen"):  # it has fewer pixels than low detail allows
        assert whole.image_tokens == low.image_tokens
        assert low.cached_tokens < whole.image_tokens  # and is another image nevertheless
    else:
        assert low.image_tokens * 4 < whole.image_tokens
