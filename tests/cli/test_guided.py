"""`penstock serve smollm2`, and what an application does that wants answers of a certain form."""

from __future__ import annotations

import json
import re
import threading
import time
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.cli.real_server import MODEL, RealServer
from tests.text.walking import sdk_schemas

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
    whole = 0
    for name, schema, _ in sdk_schemas("openai.types.chat", every=12):
        form: Any = {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": schema}}
        answer = ask(server, "An example, please.", response_format=form, max_tokens=120, temperature=0.8, seed=1)
        if answer.finish_reason == "stop":
            assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(answer.message.content)), name
            whole += 1
    assert whole >= 2


def test_a_stream_goes_on_while_a_hostile_schema_is_refused(server: RealServer) -> None:
    assert ask(server, "x", extra_body={"guided_choice": ["a"]}).message.content == "a"
    arrivals: list[float] = []

    def read() -> None:
        for _ in server.openai.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me a story."}],
            stream=True,
            max_tokens=150,
            extra_body={"ignore_eos": True},
        ):
            arrivals.append(time.monotonic())

    reader = threading.Thread(target=read)
    reader.start()
    began_s = time.monotonic()
    hostile = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(4000)}}
    with pytest.raises(openai.BadRequestError, match="too complex"):
        ask(server, "x", extra_body={"guided_json": hostile})
    ended_s = time.monotonic()
    assert len([at for at in arrivals if began_s < at < ended_s]) > 5
    reader.join()
