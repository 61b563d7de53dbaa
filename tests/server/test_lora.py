"""Adapters come and go while the replica serves, are asked for as models, and are there again after a restart."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.core.model_config import ModelConfig
from penstock.core.settings import ServerSettings
from tests.engine.expecting import no_pause
from tests.model.lora import write_adapter
from tests.server.replica import NAME, Replica, serving
from tests.waiting import GIVE_UP_S, eventually

CONFIG = ModelConfig("llama", 64, 8, 8, 1, 1, 1, 8, 64)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters")
    for seed in range(5):
        write_adapter(path / f"a{seed}", CONFIG, seed=seed, rank=2)
    return path


@pytest.fixture
def noted(tmp_path: Path) -> Path:
    return tmp_path / "adapters.json"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    noted = tmp_path_factory.mktemp("noted") / "adapters.json"
    with serving(ServerSettings(adapter_file=str(noted)), sleep=no_pause, max_loras=2, max_cpu_loras=3) as replica:
        yield replica


@pytest.fixture
def adapted(running: Replica) -> Iterator[Replica]:
    yield running
    for name in list(running.model.adapters):
        unload(running, name)


def load(replica: Replica, name: str, path: Path, **options: Any) -> tuple[int, Any]:
    body = {"lora_name": name, "lora_path": str(path), **options}
    status, _, answer = replica.call("POST", "/v1/load_lora_adapter", body)
    return status, answer


def unload(replica: Replica, name: str) -> tuple[int, Any]:
    status, _, answer = replica.call("POST", "/v1/unload_lora_adapter", {"lora_name": name})
    return status, answer


def say(replica: Replica, model: str, count: int = 6) -> str:
    answer = replica.openai.completions.create(model=model, prompt="one two", max_tokens=count, temperature=0)
    assert answer.model == model
    return answer.choices[0].text


def test_adapter_is_asked_for_as_a_model(adapted: Replica, adapters: Path) -> None:
    assert load(adapted, "poet", adapters / "a0") == (200, b"Success: LoRA adapter 'poet' added successfully.")
    assert say(adapted, "poet") == adapted.adapted_answer("one two", 6, "poet")
    assert say(adapted, NAME) == adapted.answer("one two", 6)
    assert say(adapted, "poet") != say(adapted, NAME)
    base, card = adapted.openai.models.list().data
    assert (base.id, card.id) == (NAME, "poet")
    assert card.to_dict()["parent"] == NAME
    assert card.to_dict()["root"] == str(adapters / "a0")
    assert adapted.openai.models.retrieve("poet").id == "poet"
    chat = {"model": "poet", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
    for path in ("/v1/messages", "/v1/chat/completions"):
        status, _, answer = adapted.call("POST", path, chat)
        assert (status, answer["model"]) == (200, "poet")


def test_more_adapters_than_have_room_take_turns(adapted: Replica, adapters: Path) -> None:
    for seed in range(5):
        assert load(adapted, f"a{seed}", adapters / f"a{seed}")[0] == 200
    expected = {f"a{seed}": adapted.adapted_answer("one two", 8, f"a{seed}") for seed in range(5)}
    found: dict[str, str] = {}
    threads = [threading.Thread(target=lambda n=name: found.update({n: say(adapted, n, 8)})) for name in expected]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GIVE_UP_S)
    assert found == expected
    eventually(lambda: len(adapted.engine.adapters.device) == 2)
    assert len(adapted.engine.adapters.host) == 3
    assert adapted.engine.adapters.swaps >= 5
    metrics = adapted.final_metrics()
    places = {place: metrics[f"penstock_lora_adapters{{{place}}}"] for place in ("loaded", "host", "device")}
    assert places == {"loaded": 5, "host": 3, "device": 2}
    assert metrics["penstock_lora_swaps_total"] == adapted.engine.adapters.swaps
    assert metrics["penstock_lora_reads_total"] >= 5


def test_name_is_another_content_only_if_one_says_so(adapted: Replica, adapters: Path, tmp_path: Path) -> None:
    load(adapted, "poet", adapters / "a0")
    shutil.copytree(adapters / "a0", tmp_path / "copy")
    assert load(adapted, "poet", tmp_path / "copy")[0] == 200  # the same content: nothing changes
    status, answer = load(adapted, "poet", adapters / "a1")
    assert (status, answer["error"]["code"]) == (409, "conflict")
    first = say(adapted, "poet")
    assert load(adapted, "poet", adapters / "a1", load_inplace=True)[0] == 200
    assert say(adapted, "poet") == adapted.adapted_answer("one two", 6, "poet") != first
    eventually(lambda: len(adapted.engine.adapters.host) == 1)


def test_unloaded_adapter_is_gone_and_two_names_may_stand_for_one_content(adapted: Replica, adapters: Path) -> None:
    load(adapted, "poet", adapters / "a0")
    load(adapted, "bard", adapters / "a0")
    assert unload(adapted, "poet") == (200, b"Success: LoRA adapter 'poet' removed successfully.")
    assert adapted.post("/v1/completions", model="poet", prompt="x")[0] == 404
    assert say(adapted, "bard") == adapted.adapted_answer("one two", 6, "bard")
    assert unload(adapted, "bard")[0] == 200
    eventually(lambda: adapted.engine.adapters.host == [])
    status, answer = unload(adapted, "bard")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


def test_unloading_waits_for_those_who_run(noted: Path, adapters: Path) -> None:
    with serving(ServerSettings(adapter_file=str(noted)), max_loras=2, step_s=0.02) as replica:
        load(replica, "poet", adapters / "a0")
        stream = replica.openai.completions.create(
            model="poet", prompt="one two", max_tokens=25, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = [next(iter(stream))]
        ended: list[tuple[int, Any]] = []
        unloading = threading.Thread(target=lambda: ended.append(unload(replica, "poet")))
        unloading.start()
        eventually(lambda: "poet" not in replica.model.adapters)
        assert replica.post("/v1/completions", model="poet", prompt="x")[0] == 404
        chunks += stream
        assert chunks[-1].choices[0].finish_reason == "length", "it ran to its end"
        unloading.join(GIVE_UP_S)
        assert ended[0][0] == 200
        assert replica.engine.adapters.host == []


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"lora_name": NAME, "lora_path": "x"}, 409, "lora_name"),
        ({"lora_name": "no spaces", "lora_path": "x"}, 400, "lora_name"),
        ({"lora_name": "all*", "lora_path": "x"}, 400, "lora_name"),
        ({"lora_name": "poet", "lora_path": "/nowhere"}, 400, "lora_path"),
        ({"lora_name": "poet"}, 400, "lora_path"),
        ({"lora_name": "poet", "lora_path": "x", "rank": 3}, 400, "rank"),
    ],
)
def test_bad_load_is_refused(adapted: Replica, body: dict[str, Any], status: int, param: str) -> None:
    found, _, answer = adapted.call("POST", "/v1/load_lora_adapter", body)
    assert (found, answer["error"]["param"]) == (status, param)


def test_unsupported_adapter_says_why(adapted: Replica, tmp_path: Path) -> None:
    status, answer = load(adapted, "dora", write_adapter(tmp_path / "dora", CONFIG, use_dora=True))
    assert (status, answer["error"]["reason"]) == (400, "model_unsupported")
    assert "DoRA" in answer["error"]["message"]


@pytest.mark.slow
def test_adapters_are_loaded_by_those_who_may_act_as_a_gateway(noted: Path, adapters: Path) -> None:
    settings = ServerSettings(adapter_file=str(noted), gateway_secret="hush")
    body = {"lora_name": "poet", "lora_path": str(adapters / "a0")}
    with serving(settings, max_loras=2) as replica:
        assert replica.call("POST", "/v1/load_lora_adapter", body)[0] == 403
        assert replica.call("POST", "/v1/unload_lora_adapter", {"lora_name": "poet"})[0] == 403
        assert replica.call("POST", "/v1/load_lora_adapter", body, **{"x-penstock-secret": "hush"})[0] == 200


def test_engine_that_runs_no_adapters_says_so(replica: Replica, adapters: Path) -> None:
    status, answer = load(replica, "poet", adapters / "a0")
    assert (status, answer["error"]["reason"]) == (400, "model_unsupported")
    assert "start it with max_loras" in answer["error"]["message"]


def test_place_that_must_stay_free_is_not_pinned_and_leaves_nothing_behind(adapted: Replica, adapters: Path) -> None:
    assert load(adapted, "first", adapters / "a0", pinned=True)[0] == 200
    status, answer = load(adapted, "second", adapters / "a1", pinned=True)
    assert (status, answer["error"]["code"]) == (409, "conflict")
    assert list(adapted.model.adapters) == ["first"]
    eventually(lambda: len(adapted.engine.adapters.host) == 1)


def test_adapters_are_restored_when_the_engine_dies(adapted: Replica, adapters: Path) -> None:
    load(adapted, "poet", adapters / "a0")
    expected = say(adapted, "poet")
    adapted.kill_engine()
    eventually(lambda: adapted.engine.restarts > 0 and adapted.engine.state == "ready")
    assert say(adapted, "poet") == expected


@pytest.mark.slow
def test_adapters_are_restored_when_the_server_starts_again(noted: Path, adapters: Path) -> None:
    settings = ServerSettings(adapter_file=str(noted))
    with serving(settings, max_loras=3) as replica:
        for name, path in {"poet": "a0", "gone": "a1", "bard": "a2"}.items():
            load(replica, name, adapters / path, pinned=name == "bard")
        unload(replica, "gone")
    stored = json.loads(noted.read_text())
    assert stored == {"poet": {"path": str(adapters / "a0")}, "bard": {"path": str(adapters / "a2"), "pinned": True}}
    noted.write_text(json.dumps(stored | {"lost": {"path": "/nowhere"}}))
    with serving(settings, restores={"given": str(adapters / "a3")}, max_loras=3) as again:
        assert sorted(again.model.adapters) == ["bard", "given", "poet"]
        assert say(again, "poet") == again.adapted_answer("one two", 6, "poet")
        assert again.model.adapters["bard"].pinned
    assert "lost" in json.loads(noted.read_text()), "what is not there today may be tomorrow"


@pytest.mark.slow
def test_file_that_cannot_be_written_stops_nobody(tmp_path: Path, adapters: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with serving(ServerSettings(adapter_file=str(tmp_path / "file" / "a.json")), max_loras=2) as replica:
        assert load(replica, "poet", adapters / "a0")[0] == 200
        assert say(replica, "poet") == replica.adapted_answer("one two", 6, "poet")
        assert unload(replica, "poet")[0] == 200
