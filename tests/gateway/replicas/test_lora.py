"""Adapters behind a gateway: names of their own that a tenant must be allowed, replicas that are made to have them, and
requests that go only where they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.core.errors import ConfigError
from penstock.core.replica import ReplicaState
from penstock.core.settings import ServerSettings
from penstock.gateway.settings.gateway import ModelSettings, routes_of
from tests.clocks import ManualClock
from tests.dialects.servers import FakeServer, FakeSglang, FakeTgi, FakeVllm, Reply, as_json
from tests.gateway.running import Notes, RunningGateway, running_gateway
from tests.model.lora import write_adapter
from tests.server.replica import NAME, Replica, serving
from tests.server.test_lora import CONFIG
from tests.waiting import eventually


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    path = tmp_path_factory.mktemp("adapters")
    return {name: str(write_adapter(path / name, CONFIG, seed=seed)) for seed, name in enumerate(("poet", "bard"))}


@contextlib.contextmanager
def fleet(
    noted: Path, adapters: dict[str, str | None], count: int = 2
) -> Iterator[tuple[RunningGateway, list[Replica]]]:
    """Replicas that know of no adapter, behind a gateway that does."""
    with contextlib.ExitStack() as stack:
        settings = [ServerSettings(adapter_file=str(noted / f"{place}.json")) for place in range(count)]
        replicas = [stack.enter_context(serving(each, max_loras=2, step_s=0.01)) for each in settings]
        urls = [f"http://{replica.host}:{replica.port}" for replica in replicas]
        pools = {NAME: ModelSettings(replicas=urls, adapters=adapters)}
        gateway = stack.enter_context(running_gateway(pools=pools))
        yield gateway, replicas


def has_all(gateway: RunningGateway, names: set[str]) -> bool:
    return all(replica.snapshot.adapters >= names for replica in gateway.app.replicas.values())


def say(client: openai.OpenAI, model: str) -> str:
    answer = client.completions.create(model=model, prompt="one two", max_tokens=6, temperature=0)
    assert answer.model == model
    return answer.choices[0].text


@pytest.mark.slow
def test_replicas_get_what_is_configured_and_tenants_what_they_are_allowed(
    tmp_path: Path, adapters: dict[str, str | None]
) -> None:
    with fleet(tmp_path, adapters) as (gateway, replicas):
        eventually(lambda: has_all(gateway, {"poet", "bard"}))
        one = replicas[0]
        expected = {name: one.adapted_answer("one two", 6, name) for name in ("poet", "bard")}
        assert {name: say(gateway.openai, name) for name in expected} == expected
        assert say(gateway.openai, NAME) == one.answer("one two", 6)

        plain = gateway.client(gateway.add_tenant("plain"))
        reader = gateway.client(gateway.add_tenant("reader", adapters=["po*"]))
        barred = gateway.client(gateway.add_tenant("barred", models=["other"], adapters=["*"]))
        assert [card.id for card in plain.models.list().data] == [NAME]
        assert [card.id for card in reader.models.list().data] == [NAME, "poet"]
        assert barred.models.list().data == []
        assert say(reader, "poet") == expected["poet"]
        eventually(lambda: ("reader", "poet") in {(one.tenant_id, one.model) for one in gateway.ledger.usages})
        for client, name in ((plain, "poet"), (reader, "bard"), (barred, "poet")):
            with pytest.raises(openai.NotFoundError, match=f"no model '{name}'"):
                say(client, name)

        stream = reader.completions.create(
            model="poet", prompt="one two", max_tokens=200, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        whole = one.adapted_answer("one two", 200, "poet", ignore_eos=True)
        chunks = [next(stream)]
        busy = next(replica for replica in replicas if replica.engine.num_open)
        busy.kill_engine()  # what it began is carried on with the same adapter; what it had, it has again
        assert "".join(chunk.choices[0].text for chunk in [*chunks, *stream]) == whole
        eventually(lambda: busy.engine.restarts == 1 and busy.engine.state == "ready")
        eventually(lambda: has_all(gateway, {"poet", "bard"}))
        replicas[0].call("POST", "/v1/penstock/drain")
        eventually(lambda: [r.snapshot.state for r in gateway.app.replicas.values()].count(ReplicaState.READY) == 1)
        assert say(reader, "poet") == expected["poet"]


@pytest.mark.slow
def test_request_goes_where_the_adapter_is(tmp_path: Path, adapters: dict[str, str | None]) -> None:
    unknown: dict[str, str | None] = dict.fromkeys(adapters)  # the gateway does not know where they are
    with fleet(tmp_path, unknown) as (gateway, replicas):
        with pytest.raises(openai.APIStatusError) as refused:
            say(gateway.openai, "poet")
        assert refused.value.status_code in (429, 503)
        path = adapters["poet"]
        replicas[1].call("POST", "/v1/load_lora_adapter", {"lora_name": "poet", "lora_path": path})
        eventually(lambda: any(r.snapshot.adapters for r in gateway.app.replicas.values()))
        expected = replicas[1].adapted_answer("one two", 6, "poet")
        assert {say(gateway.openai, "poet") for _ in range(6)} == {expected}


@dataclass
class LoraVllm(FakeVllm):
    adapters: dict[str, str] = field(default_factory=dict)

    def documents(self) -> dict[str, Reply]:
        cards: list[dict[str, Any]] = [{"id": self.model, "owned_by": "vllm", "max_model_len": 4096, "parent": None}]
        cards += [{"id": name, "root": path, "parent": self.model} for name, path in self.adapters.items()]
        return {**super().documents(), "/v1/models": as_json({"object": "list", "data": cards})}

    def refusal(self, path: str, asked: dict[str, Any]) -> Reply | None:
        if path == "/v1/unload_lora_adapter":
            if self.adapters.pop(asked["lora_name"], None) is None:
                return as_json({"error": {"message": "The lora adapter cannot be found."}}, 404)
            return 200, {}, b"Success: LoRA adapter removed successfully."
        if path == "/v1/load_lora_adapter":
            if asked["lora_name"] in self.adapters:
                return as_json({"error": {"message": f"'{asked['lora_name']}' has already been loaded"}}, 400)
            self.adapters[asked["lora_name"]] = asked["lora_path"]
            return 200, {}, b"Success: LoRA adapter added successfully."
        if asked["model"] not in (self.model, *self.adapters):
            return as_json({"error": {"message": "no such model"}}, 404)
        return super().refusal(path, asked)


@dataclass
class LoraSglang(FakeSglang):
    adapters: dict[str, str] = field(default_factory=dict)

    def refusal(self, path: str, asked: dict[str, Any]) -> Reply | None:
        if path == "/unload_lora_adapter":
            if self.adapters.pop(asked["lora_name"], None) is None:
                return as_json({"success": False, "error_message": "LoRA adapter does not exist"}, 400)
            return as_json({"success": True, "loaded_adapters": self.adapters})
        if path == "/load_lora_adapter":
            self.adapters[asked["lora_name"]] = asked["lora_path"]
            return as_json({"success": True, "loaded_adapters": self.adapters})
        assert asked["model"] == self.model
        return None if asked.get("lora_path") in (None, *self.adapters) else as_json({"error": "no such LoRA"}, 400)


@pytest.mark.parametrize("kind", [LoraVllm, LoraSglang])
def test_other_engines_are_made_to_load_them_and_asked_in_their_words(kind: type[FakeServer]) -> None:
    with kind() as server:
        assert isinstance(server, LoraVllm | LoraSglang)
        server.adapters = {"bard": "/adapters/bard"} if kind is LoraVllm else {}  # as an earlier gateway left it
        adapters: dict[str, str | None] = {"poet": "/adapters/poet", "bard": "/adapters/bard"}
        pools = {"m": ModelSettings(replicas=[server.url], dialect=server.dialect, adapters=adapters)}
        with running_gateway(pools=pools, clock=ManualClock()) as gateway:
            gateway.until(lambda: all(r.loaded == {"poet", "bard"} for r in gateway.app.replicas.values()))
            assert server.adapters == {"poet": "/adapters/poet", "bard": "/adapters/bard"}
            gateway.openai.completions.create(model="poet", prompt="x", max_tokens=3)
            _, asked, _ = server.asked[-1]
            selected = (asked["model"],) if kind is LoraVllm else (asked["model"], asked["lora_path"])
            assert selected == (("poet",) if kind is LoraVllm else ("m", "poet"))
            gateway.openai.completions.create(model="m", prompt="x", max_tokens=3)
            assert server.asked[-1][1].get("lora_path") is None

            port = server.port  # it comes back without them
            server.kill()
            gateway.until(lambda: all(r.snapshot.state == "out" for r in gateway.app.replicas.values()))
            with kind(port=port) as again:
                assert isinstance(again, LoraVllm | LoraSglang)
                gateway.until(lambda: set(again.adapters) == {"poet", "bard"})


def test_server_that_cannot_load_adapters_is_passed_over_for_them() -> None:
    with FakeTgi() as server:
        pools = {"m": ModelSettings(replicas=[server.url], dialect="tgi", adapters={"poet": "/adapters/poet"})}
        with running_gateway(pools=pools) as gateway, pytest.raises(openai.APIStatusError) as refused:
            gateway.openai.completions.create(model="poet", prompt="x", max_tokens=3)
        assert refused.value.status_code == 503
        assert "no replica that is ready has this adapter" in str(refused.value)


def test_adapter_must_not_have_the_name_of_another() -> None:
    models = {
        "m": ModelSettings(replicas=["http://x"], adapters={"n": None}),
        "n": ModelSettings(replicas=["http://y"]),
    }
    with pytest.raises(ConfigError, match="two models or adapters are called 'n'"):
        routes_of(models)
    with pytest.raises(ConfigError, match="'n' names two routes"):
        routes_of({"m": ModelSettings(replicas=["http://x"], aliases=["n"], adapters={"n": None})})


@pytest.mark.slow
def test_what_replicas_have_though_nobody_configured_it_can_be_asked_for_by_those_who_may(
    tmp_path: Path, adapters: dict[str, str | None]
) -> None:
    with fleet(tmp_path, {}) as (gateway, replicas):
        reader = gateway.client(gateway.add_tenant("reader", adapters=["po*"]))
        plain = gateway.client(gateway.add_tenant("plain"))
        barred = gateway.client(gateway.add_tenant("barred", models=["other"], adapters=["*"]))
        with pytest.raises(openai.NotFoundError, match="no model 'poet'"):
            say(reader, "poet")
        for name in ("poet", "bard"):
            replicas[1].call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": adapters[name]})
        eventually(lambda: [card.id for card in reader.models.list().data] == [NAME, "poet"])
        assert reader.models.list().data[1].parent == NAME  # type: ignore[attr-defined]
        assert [card.id for card in plain.models.list().data] == [NAME]
        assert barred.models.list().data == []
        expected = replicas[1].adapted_answer("one two", 6, "poet")
        assert {say(reader, "poet") for _ in range(4)} == {expected}
        for client, name in ((plain, "poet"), (reader, "bard"), (barred, "poet")):
            with pytest.raises(openai.NotFoundError, match=f"no model '{name}'"):
                say(client, name)
        replicas[1].call("POST", "/v1/unload_lora_adapter", {"lora_name": "poet"})
        eventually(lambda: [card.id for card in reader.models.list().data] == [NAME])


def test_adapters_that_a_vllm_names_among_its_models_are_learned() -> None:
    with LoraVllm(adapters={"poet": "/adapters/poet"}) as server:
        with running_gateway(pools={"m": ModelSettings(replicas=[server.url], dialect="vllm")}) as gateway:
            eventually(lambda: [card.id for card in gateway.openai.models.list().data] == ["m", "poet"])
            gateway.openai.completions.create(model="poet", prompt="x", max_tokens=3)
        assert server.asked[-1][1]["model"] == "poet"


@pytest.mark.parametrize("kind", [LoraVllm, LoraSglang])
def test_what_is_no_longer_configured_is_taken_from_those_it_was_brought_to(kind: type[FakeServer]) -> None:
    with kind() as server, kind() as other:
        assert isinstance(server, LoraVllm | LoraSglang)
        assert isinstance(other, LoraVllm | LoraSglang)
        adapters = {"poet": "/a/poet", "bard": "/a/bard"}
        server.adapters = {"bard": "/a/bard"} if kind is LoraVllm else {}  # by hand
        other.adapters = {"poet": "/a/poet"}
        urls, notes = [server.url, other.url], Notes()

        def pools(configured: dict[str, str | None]) -> dict[str, ModelSettings]:
            return {"m": ModelSettings(replicas=urls, dialect=server.dialect, adapters=configured)}

        with running_gateway(pools=pools({**adapters}), notes=notes) as gateway:
            eventually(lambda: all(r.loaded == {"poet", "bard"} for r in gateway.app.replicas.values()))
        # SGLang says of none that it had it already, so all that was asked of it counts as brought.
        by_hand = {(server.url, "bard"), (other.url, "poet")} if kind is LoraVllm else set()
        assert notes.all == {(url, name) for url in urls for name in adapters} - by_hand
        with running_gateway(pools=pools({"bard": "/a/bard"}), notes=notes):
            eventually(lambda: "poet" not in server.adapters)
            eventually(lambda: (server.url, "poet") not in notes.all)
            eventually(lambda: ("poet" in other.adapters) == (kind is LoraVllm))
        assert "bard" in server.adapters
        assert ("poet" in other.adapters) == (kind is LoraVllm)  # there it was loaded by hand


def test_gateways_whose_configurations_differ_do_not_fight() -> None:
    """One that no longer names an adapter takes it away once; the other one, which does, brings it again."""
    with LoraVllm() as server:
        notes, plain = Notes(), ModelSettings(replicas=[server.url], dialect="vllm")
        bringing = {"m": replace(plain, adapters={"poet": "/a/poet"})}
        with running_gateway(pools=bringing, notes=notes, clock=ManualClock()) as gateway:
            gateway.until(lambda: "poet" in server.adapters)
            (replica,) = gateway.app.replicas.values()
            gateway.advance(30.0)  # so often it is asked what it has
            gateway.until(lambda: replica.listed == {"poet"})
            with running_gateway(pools={"m": plain}, notes=notes) as other:
                eventually(lambda: [path for path, *_ in server.asked].count("/v1/unload_lora_adapter") == 1)
                eventually(lambda: (dict(server.adapters), set(notes.all)), lambda left: left == ({}, set()))
                gateway.advance(30.0)
                gateway.until(lambda: "poet" in server.adapters and notes.all == {(server.url, "poet")})
                other.advance(30.0)  # the other one sees it again, and lets it be
                eventually(lambda: [one.listed for one in other.app.replicas.values()] == [{"poet"}])
            gateway.openai.completions.create(model="poet", prompt="x", max_tokens=3)
        assert [path for path, *_ in server.asked].count("/v1/unload_lora_adapter") == 1


@pytest.mark.slow
def test_a_penstock_replica_loses_what_the_configuration_lost_and_keeps_what_was_loaded_by_hand(
    tmp_path: Path, adapters: dict[str, str | None]
) -> None:
    notes = Notes()
    with serving(ServerSettings(adapter_file=str(tmp_path / "a.json")), max_loras=2) as replica:
        urls = [f"http://{replica.host}:{replica.port}"]
        replica.call("POST", "/v1/load_lora_adapter", {"lora_name": "bard", "lora_path": adapters["bard"]})
        with running_gateway(pools={NAME: ModelSettings(replicas=urls, adapters=adapters)}, notes=notes) as gateway:
            eventually(lambda: has_all(gateway, {"poet", "bard"}))
            eventually(lambda: notes.all == {(urls[0], "poet")})
        with running_gateway(pools={NAME: ModelSettings(replicas=urls)}, notes=notes) as gateway:
            eventually(lambda: set(replica.model.adapters) == {"bard"})
            eventually(lambda: [card.id for card in gateway.openai.models.list().data] == [NAME, "bard"])
            eventually(lambda: notes.all == set())
