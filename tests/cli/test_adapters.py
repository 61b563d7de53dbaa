"""Adapters behind a real gateway in front of real replicas: what is configured comes, and goes when it is no longer.
What somebody loads by hand is learned, and stays."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
from tools.drills.stand import MODEL, Process, stand, until

from penstock.hub.resolve import describe
from tests.model.lora import write_adapter

pytestmark = pytest.mark.slow


def adapters_of(replica: Process) -> set[str]:
    return {name for name, *_ in replica.get("/v1/penstock/snapshot")["adapters"]}


def post(replica: Process, path: str, **body: str) -> None:
    headers = {"content-type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(replica.url + path, json.dumps(body).encode(), headers), timeout=10)


def visible(gateway: Process, key: str) -> list[str]:
    return [card.id for card in client(gateway, key).models.list().data]


def client(gateway: Process, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)


def test_adapters_follow_the_configuration_and_those_of_hands_are_learned(tmp_path: Path) -> None:
    with stand(tmp_path, context=1024) as place:
        model = describe(str(place.model)).config
        paths = {
            name: str(write_adapter(tmp_path / name, model, seed=seed)) for seed, name in enumerate(("poet", "bard"))
        }
        one, other = (
            place.replica("--max-loras", "4", "--adapter-file", str(tmp_path / f"{number}.json")) for number in range(2)
        )
        until(lambda: one.is_ready() and other.is_ready())
        everything = place.tenant("everything", "--adapters", "*")
        nothing = place.tenant("nothing")

        def configured(**adapters: str) -> dict[str, Any]:
            return {"models": {MODEL: {"replicas": [one.url, other.url], "adapters": adapters}}}

        gateway = place.gateway(one, other, **configured(poet=paths["poet"]))
        until(lambda: adapters_of(one) == adapters_of(other) == {"poet"})
        post(other, "/v1/load_lora_adapter", lora_name="bard", lora_path=paths["bard"])
        until(lambda: visible(gateway, everything) == [MODEL, "poet", "bard"])
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
        until(lambda: (adapters_of(one), adapters_of(other)) == (set(), {"bard"}))
        until(lambda: visible(gateway, everything) == [MODEL, "bard"])
        assert (
            client(gateway, everything).completions.create(model="bard", prompt="one two", max_tokens=8, seed=1).choices
            == said["bard"].choices
        )

        gateway.end()  # a configuration that names what was loaded by hand does not own it
        gateway = place.gateway(one, other, **configured(bard=paths["bard"]))
        until(lambda: adapters_of(one) == adapters_of(other) == {"bard"})
        gateway.end()
        place.gateway(one, other, **configured())
        until(lambda: (adapters_of(one), adapters_of(other)) == (set(), {"bard"}))
        assert place.complaints() == []
