"""`penstock serve smollm2`, and what an application does that wants answers of a certain form."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.cli.real_server import MODEL, RealServer
from tests.text.walking import sdk_schemas
from tests.waiting import eventually

pytestmark = pytest.mark.slow


class City(BaseModel):
    name: str
    country: str
    kind: Literal["capital", "town", "village"]
    has_river: bool


def ask(server: RealServer, text: str, **options: Any) -> Any:
    body = {"model": MODEL, "max_tokens": 120, "temperature": 0} | options
    return server.openai.chat.completions.create(messages=[{"role": "user", "content": text}], **body).choices[0]


def test_an_answer_is_parsed_into_a_pydantic_model(server: RealServer) -> None:
    answer = server.openai.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Describe Paris, the capital of France, as JSON."}],
        response_format=City,
        max_tokens=120,
        temperature=0,
    )
    city = answer.choices[0].message.parsed
    assert city is not None
    assert city.name == "Paris"
    assert city.kind == "capital"


def test_a_choice_among_words_is_the_models_own(server: RealServer) -> None:
    answer = ask(server, "Is Paris in France or in Japan?", extra_body={"guided_choice": ["Japan", "France"]})
    assert (answer.message.content, answer.finish_reason) == ("France", "stop")


def test_a_seeded_guided_answer_comes_again(server: RealServer) -> None:
    wanted: Any = {"temperature": 1.0, "seed": 5, "extra_body": {"guided_regex": r"[A-Z][a-z]{3,9} [0-9]{4}"}}
    first, second = (ask(server, "A name and a year, please.", **wanted).message.content for _ in range(2))
    assert re.fullmatch(r"[A-Z][a-z]{3,9} [0-9]{4}", first)
    assert first == second


def test_answers_to_real_schemas_are_valid(server: RealServer) -> None:
    schemas = {name: schema for name, schema, _ in sdk_schemas("openai.types.chat", every=12)}

    def answer(schema: Any) -> Any:
        form: Any = {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": schema}}
        return ask(server, "An example, please.", response_format=form, max_tokens=120, temperature=0.8, seed=1)

    with ThreadPoolExecutor(len(schemas)) as pool:
        answers = dict(zip(schemas, pool.map(answer, schemas.values()), strict=True))
    whole = {name: found.message.content for name, found in answers.items() if found.finish_reason == "stop"}
    for name, content in whole.items():
        assert jsonschema.Draft202012Validator(schemas[name]).is_valid(json.loads(content)), name
    assert len(whole) >= 2


def test_a_stream_goes_on_while_a_hostile_schema_is_refused(tiny: RealServer) -> None:
    """The schema is tried for a second of a processor's time, by a process that all others go before."""
    num_chunks = 0
    is_over = threading.Event()

    def read(stream: openai.Stream[Any]) -> None:
        nonlocal num_chunks
        for _ in stream:
            num_chunks += 1
            if is_over.is_set():
                return

    body = {"model": tiny.model, "prompt": "A story"}
    with tiny.openai.completions.create(
        **body, stream=True, max_tokens=60_000, extra_body={"ignore_eos": True}
    ) as stream:
        reader = threading.Thread(target=read, args=(stream,))
        reader.start()
        eventually(lambda: num_chunks)
        hostile = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(4000)}}
        before = num_chunks
        # A fast processor may get as far as the parser's own bound.
        with pytest.raises(openai.BadRequestError, match=r"too complex|Current row has 16007 items; max is 2000"):
            tiny.openai.completions.create(**body, extra_body={"guided_json": hostile})
        during = num_chunks - before
        is_over.set()
        reader.join()
    assert during > 5
