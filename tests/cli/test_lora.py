"""Adapters behind a real gateway in front of real replicas: what is configured comes, and goes when it is no longer.
What somebody loads by hand is learned, and stays."""

from __future__ import annotations

import json
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any

import openai
import pytest
from tools.drills.stand import MODEL, PATIENT, Process, stand

from penstock.hub.resolve import describe
from tests.model.lora import write_adapter
from tests.sdk import Unverified
from tests.waiting import eventually

pytestmark = pytest.mark.slow


def adapters_of(replica: Process) -> set[str]:
    return {name for name, *_ in replica.get("/v1/penstock/snapshot")["adapters"]}


def post(replica: Process, path: str, **body: str) -> None:
    headers = {"content-type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(replica.url + path, json.dumps(body).encode(), headers), timeout=60)


def visible(gateway: Process, key: str) -> list[str]:
    return [card.id for card in client(gateway, key).models.list().data]


@cache
def client(gateway: Process, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0, http_client=Unverified(), timeout=60)


def test_adapters_follow_the_configuration_and_those_of_hands_are_learned(tmp_path: Path) -> None:
    with stand(tmp_path, context=1024) as place:
        model = describe(str(place.model)).config
        paths = {
            name: str(write_adapter(tmp_path / name, model, seed=seed)) for seed, name in enumerate(("poet", "bard"))
        }
        one, other = (
            place.replica("--max-loras", "4", "--adapter-file", str(tmp_path / f"{number}.json")) for number in range(2)
        )
        eventually(lambda: one.is_ready() and other.is_ready())
        everything = place.tenant("everything", "--adapters", "*")
        nothing = place.tenant("nothing")

        def configured(**adapters: str) -> dict[str, Any]:
            return {"models": {MODEL: {"replicas": [one.url, other.url], "adapters": adapters}}, **PATIENT}

        def loaded(first: set[str], second: set[str]) -> None:
            eventually(lambda: (adapters_of(one), adapters_of(other)), lambda found: found == (first, second))

        def shown(*names: str) -> None:
            eventually(lambda: visible(gateway, everything), lambda found: found == list(names))

        gateway = place.gateway(one, other, **configured(poet=paths["poet"]))
        loaded({"poet"}, {"poet"})
        post(other, "/v1/load_lora_adapter", lora_name="bard", lora_path=paths["bard"])
        shown(MODEL, "poet", "bard")
        assert visible(gateway, nothing) == [MODEL]
        said = {
            name: client(gateway, everything).completions.create(model=name, prompt="one two", max_tokens=8, seed=1)
            for name in (MODEL, "poet", "bard")
        }
        assert len({answer.choices[0].text for answer in said.values()}) == 3
        with pytest.raises(openai.NotFoundError, match="no model 'bard'"):
            client(gateway, nothing).completions.create(model="bard", prompt="one two", max_tokens=8)

        gateway.end()  # and from now on the file names none
        gateway = place.gateway(one, other, **configured())
        loaded(set(), {"bard"})
        shown(MODEL, "bard")
        assert (
            client(gateway, everything).completions.create(model="bard", prompt="one two", max_tokens=8, seed=1).choices
            == said["bard"].choices
        )

        gateway.end()  # a configuration that names what was loaded by hand does not own it
        gateway = place.gateway(one, other, **configured(bard=paths["bard"]))
        loaded({"bard"}, {"bard"})
        gateway.end()
        place.gateway(one, other, **configured())
        loaded(set(), {"bard"})
        assert place.complaints() == []
