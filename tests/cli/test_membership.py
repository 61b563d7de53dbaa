"""Replicas, models and settings that change while a real gateway runs."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.tenancy.store import open_store
from tests.cli.real_gateway import RealGateway, real_gateway
from tests.server.replica import NAME, Replica, serving
from tests.waiting import eventually

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[Replica]]:
    with serving() as one, serving() as two:
        yield [one, two]


def url(replica: Replica) -> str:
    return f"http://{replica.host}:{replica.port}"


def chat(model: str) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


def known(gateway: RealGateway) -> dict[str, str]:
    """States of its replicas, by id."""
    return {one["id"]: one["state"] for one in gateway.ask("GET", "/admin/v1/replicas")[1]["replicas"]}


def status(gateway: RealGateway, model: str) -> int:
    return gateway.ask("POST", "/v1/chat/completions", chat(model))[0]


def test_commands_add_drain_and_remove_replicas_on_every_gateway(tmp_path: Path, replicas: list[Replica]) -> None:
    one, two = replicas
    with real_gateway(tmp_path, one) as first, real_gateway(tmp_path, one) as second:
        first.command("replicas", "add", NAME, url(two))
        for gateway in (first, second):
            eventually(
                lambda gateway=gateway: known(gateway), lambda seen: seen == {url(one): "ready", url(two): "ready"}
            )
        assert url(two) in first.command("replicas", "list")
        first.command("replicas", "drain", url(two))
        for gateway in (first, second):
            eventually(lambda gateway=gateway: known(gateway)[url(two)], lambda state: state == "draining")
        assert {status(first, NAME) for _ in range(4)} == {200}
        first.command("replicas", "remove", url(two))
        for gateway in (first, second):
            eventually(lambda gateway=gateway: known(gateway), lambda seen: seen == {url(one): "ready"})
        with pytest.raises(subprocess.CalledProcessError) as refused:
            first.command("replicas", "remove", url(one))
        assert "a gateway's file" in refused.value.stderr


def test_a_replica_of_the_file_is_drained_by_the_store(tmp_path: Path, replicas: list[Replica]) -> None:
    one, two = replicas
    with real_gateway(tmp_path, one, two) as gateway:
        gateway.command("replicas", "add", NAME, url(two), "--draining")
        eventually(lambda: known(gateway)[url(two)], lambda state: state == "draining")
        sources = {row["source"] for row in gateway.ask("GET", "/admin/v1/replicas")[1]["replicas"]}
        assert sources == {"file"}
        gateway.command("replicas", "remove", url(two))
        eventually(lambda: known(gateway)[url(two)], lambda state: state == "ready")
        wrong = {"model": NAME, "url": url(two), "options": {"dialect": "klingon"}}
        code, answer = gateway.ask("POST", "/admin/v1/replicas", wrong)
        assert (code, answer["error"]["param"]) == (422, "dialect")


def test_a_model_appears_with_its_first_replica_and_goes_with_its_last(tmp_path: Path, replicas: list[Replica]) -> None:
    one, two = replicas
    with real_gateway(tmp_path, one) as gateway:
        assert status(gateway, "new") == 404
        asked = {"model": "new", "url": url(two), "options": {"served_as": NAME}}
        assert gateway.ask("POST", "/admin/v1/replicas", asked)[0] == 201
        eventually(lambda: status(gateway, "new"), lambda found: found == 200)
        assert "new" in {card["id"] for card in gateway.ask("GET", "/v1/models")[1]["data"]}
        assert gateway.ask("DELETE", "/admin/v1/replicas", {"url": url(two)})[0] == 200
        eventually(lambda: status(gateway, "new"), lambda found: found == 404)


def test_a_pool_may_be_empty_and_its_requests_are_refused_or_held(tmp_path: Path, replicas: list[Replica]) -> None:
    models = {
        "refusing": {"served_as": NAME},
        "holding": {"served_as": NAME, "hold_s": 60},
        NAME: {"replicas": [url(replicas[0])]},
    }
    with real_gateway(tmp_path, models=models) as gateway:
        code, answer = gateway.ask("POST", "/v1/chat/completions", chat("refusing"))
        assert (code, answer["error"]["code"]) == (503, "engine_unavailable")
        connection = gateway.connect()
        body = json.dumps(chat("holding"))
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        eventually(
            lambda: {
                one["model"]: sum(one["waiting"].values())
                for one in gateway.ask("GET", "/admin/v1/queues")[1]["queues"]
            },
            lambda waiting: waiting.get("holding") == 1,
        )
        gateway.command("replicas", "add", "holding", url(replicas[1]))
        assert connection.getresponse().status == 200
        connection.close()


def test_a_standby_replica_is_shown_and_takes_what_waits_when_its_row_changes(
    tmp_path: Path, replicas: list[Replica]
) -> None:
    with real_gateway(tmp_path, models={NAME: {"hold_s": 60}}) as gateway, open_store(gateway.store) as store:
        store.replicas.add(NAME, url(replicas[0]), is_draining=True, state="standby")
        eventually(lambda: known(gateway), lambda seen: seen == {url(replicas[0]): "standby"})
        assert "standby" in gateway.command("replicas", "list")
        connection = gateway.connect()
        connection.request("POST", "/v1/chat/completions", json.dumps(chat(NAME)), {"content-type": "application/json"})
        eventually(
            lambda: gateway.ask("GET", "/admin/v1/queues")[1]["queues"][0]["waiting"]["standard"], lambda num: num == 1
        )
        (row,) = eventually(store.fleet.demand)
        assert row.pool == NAME
        store.replicas.add(NAME, url(replicas[0]))
        assert connection.getresponse().status == 200
        connection.close()
        assert known(gateway) == {url(replicas[0]): "ready"}


def test_a_reload_takes_models_and_names_what_cannot_change(tmp_path: Path, replicas: list[Replica]) -> None:
    one, two = replicas
    with real_gateway(tmp_path, one) as gateway:
        config = tmp_path / "0.yaml"
        written = yaml.safe_load(config.read_text())
        written["models"] |= {"other": {"replicas": [url(two)], "served_as": NAME}}
        config.write_text(yaml.safe_dump(written))
        gateway.process.send_signal(signal.SIGHUP)
        eventually(lambda: status(gateway, "other"), lambda found: found == 200)

        fixed = written | {"max_arriving_bytes": 1 << 29, "models": {"small": written["models"]["small"]}}
        config.write_text(yaml.safe_dump(fixed))
        code, answer = gateway.ask("POST", "/admin/v1/reload")
        assert (code, "max_arriving_bytes cannot change" in answer["error"]["message"]) == (422, True)
        assert status(gateway, "other") == 200

        del written["models"]["other"]
        config.write_text(yaml.safe_dump(written))
        assert gateway.ask("POST", "/admin/v1/reload") == (200, {"changed": ["models"]})
        assert status(gateway, "other") == 404
        assert status(gateway, "small") == 200
