"""`penstock serve A=MODEL B=MODEL` as a user starts it: models that do not all fit, behind one address."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import tritonclient.grpc
import tritonclient.http
import yaml
from tritonclient.utils import InferenceServerException

from tests.cli.real_server import PATIENCE_S, RealServer, real_server
from tests.cli.several_models import Several, next_event
from tests.cli.tiny_model import write_tiny_model
from tests.console.browser import chromium, opened
from tests.template import engine_of
from tests.tensors.models import save_classifier
from tests.waiting import eventually

pytestmark = pytest.mark.slow

MIN_RESIDENCE_S = 1.0
# Of 1.2 GiB, three of these models may have 0.3 each at least; `classifier` has its 0.25, so two are there beside it.
NEEDS = {"weights_gib": 0.01, "kv_floor_gib": 0.01}
TEXT = ("alpha", "beta", "gamma")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    directory = tmp_path_factory.mktemp("several")
    tiny = directory / "tiny"
    tiny.mkdir()
    write_tiny_model(tiny)
    classifier = save_classifier(directory / "classifier.onnx")
    small = {"model": str(tiny), **NEEDS}
    file = directory / "models.yaml"
    models = dict.fromkeys(TEXT, small) | {"classifier": {"model": str(classifier), "pinned": True}}
    file.write_text(
        yaml.safe_dump({"memory_gib": 1.2, "min_residence_s": MIN_RESIDENCE_S, "parks": False, "models": models})
    )
    flags = ("--models", str(file), "--load", "dummy", "--dtype", "float32", "--grpc-port", "0", "--threads", "1")
    with real_server(*flags, model=None) as server:
        yield server


@pytest.fixture(scope="module")
def several(server: RealServer) -> Several:
    grpc = next(line for line in server.banner.splitlines() if line.startswith("gRPC")).rpartition(" at ")[2]
    return Several(server.url, grpc)


def test_models_that_fit_together_are_loaded_at_the_start(server: RealServer, several: Several) -> None:
    assert "memory plan of cpu, 1.20 GiB for models:" in server.banner
    assert "loaded at the start: classifier, alpha, beta; by use: gamma" in server.banner
    found = several.ask("GET", "/v1/penstock/models")[1]
    assert {one["name"]: one["state"] for one in found["models"]} == {
        "alpha": "loaded",
        "beta": "loaded",
        "classifier": "loaded",
        "gamma": "unloaded",
    }
    (device,) = found["devices"]
    assert device["held_bytes"] == sum(one["memory"]["held_bytes"] for one in found["models"])
    assert device["held_bytes"] + device["free_bytes"] == device["total_bytes"]


def test_a_request_loads_its_model_in_the_place_of_the_one_that_was_used_longest_ago(several: Several) -> None:
    for name in ("beta", "alpha"):
        assert several.chat(name)[0] == 200
        eventually(lambda name=name: several.model(name)["used_at"])
    with several.stream("gamma") as lines:
        first = next(lines)
        assert first.startswith(b": waiting for a replica, ready "), "a held stream is told of its wait in comments"
        assert next_event(lines)["model"] == "gamma"
        assert several.state("beta") == "unloaded"
        assert several.state("alpha") == "loaded"


def test_a_model_does_not_leave_in_the_middle_of_a_stream(several: Several) -> None:
    several.chat("gamma")
    several.chat("alpha")
    away = next(name for name in TEXT if several.state(name) == "unloaded")
    busy = [name for name in TEXT if name != away]
    answers: list[tuple[int, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(several.chat(away)))
    with contextlib.ExitStack() as streams:
        lines = {name: streams.enter_context(several.stream(name)) for name in busy}
        for name in busy:
            next_event(lines[name])
        asking.start()
        going = eventually(lambda: [name for name in busy if several.state(name) == "draining"])
        for name in busy:
            assert next_event(lines[name])["model"] == name
        assert going
        assert not answers
    asking.join(PATIENCE_S)
    assert answers[0][0] == 200


def test_orders_by_command_and_what_they_refuse(several: Several) -> None:
    assert several.command("load", "alpha", "--wait").returncode == 0
    with several.stream("alpha") as lines:
        next_event(lines)
        refused = several.command("unload", "alpha")
        assert refused.returncode != 0
        assert "1 request is at alpha" in refused.stderr
        assert several.command("unload", "alpha", "--drain").returncode == 0
        eventually(lambda: several.state("alpha"), lambda state: state == "draining")
        assert next_event(lines)["model"] == "alpha", "a drain lets the stream go on"
    eventually(lambda: several.state("alpha"), lambda state: state == "unloaded")
    status, found = several.chat("alpha")
    assert (status, found["error"]["reason"]) == (503, "not_loaded")
    assert "unloaded by an operator" in found["error"]["message"]
    loaded = several.command("load", "alpha", "--wait")
    assert "loaded" in loaded.stdout
    assert eventually(lambda: several.chat("alpha")[0], lambda status: status == 200)
    assert several.command("park", "alpha", "--wait").returncode == 0
    assert "parked" in several.command("list").stdout
    assert several.chat("alpha")[0] == 200, "a request wakes it"


def test_a_pinned_model_stays_and_one_more_than_fits_is_refused_in_figures(several: Several) -> None:
    for name in ("alpha", "beta"):
        assert several.order(name, "pin")[0] in (200, 202)
        eventually(lambda name=name: several.state(name), lambda state: state == "loaded")
    status, found = several.order("gamma", "load")
    assert (status, found["error"]["reason"]) == (409, "no_room")
    assert "the device has 1.20 GiB for models" in found["error"]["message"]
    assert "by alpha" in found["error"]["message"]
    refused = eventually(lambda: several.chat("gamma"), lambda answer: answer[0] == 503)
    assert "too little" in refused[1]["error"]["message"]
    assert several.order("alpha", "unload", {"drain": True})[1]["error"]["reason"] == "pinned"
    for name in ("alpha", "beta"):
        assert several.order(name, "unpin")[0] == 200
    assert eventually(lambda: several.chat("gamma")[0], lambda status: status == 200)


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_tritonclient_sees_unloads_loads_and_uses_models(several: Several, kind: str) -> None:
    client: Any
    if kind == "http":
        place = several.url.removeprefix("http://")
        client = tritonclient.http.InferenceServerClient(place, network_timeout=PATIENCE_S)
    else:
        client = tritonclient.grpc.InferenceServerClient(several.grpc)

    def states() -> dict[str, str]:
        found = client.get_model_repository_index(**({"as_json": True} if kind == "grpc" else {}))
        return {one["name"]: one["state"] for one in (found["models"] if kind == "grpc" else found)}

    with client:
        assert states()["classifier"] == "READY"
        client.load_model("alpha")
        assert client.is_model_ready("alpha")
        client.unload_model("alpha")
        eventually(states, lambda found: found["alpha"] == "UNAVAILABLE")
        assert not client.is_model_ready("nobody") if kind == "grpc" else True
        for wrong in (lambda: client.load_model("nobody"), lambda: client.load_model("alpha", config="{}")):
            with pytest.raises(InferenceServerException):
                wrong()
        client.load_model("alpha")
        assert states()["alpha"] == "READY"


def test_a_model_that_takes_tensors_comes_and_goes_like_the_others(several: Several) -> None:
    assert several.order("classifier", "unpin")[0] == 200
    for name in TEXT:  # by use: whichever is away needs the memory of the one that was used longest ago
        assert several.chat(name)[0] == 200
    eventually(lambda: several.state("classifier"), lambda state: state == "unloaded")
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
    status, found = several.ask("POST", "/v2/models/classifier/infer", body)
    assert status == 200, found
    assert found["outputs"][0]["shape"] == [1, 3]


def test_the_console_shows_models_with_their_memory_and_gives_orders(server: RealServer, several: Several) -> None:
    with chromium() as browser, opened(browser, f"{server.url}/#/replicas") as page:
        card = page.get_by_role("region", name="Models on cpu")
        row = card.get_by_role("row", name="alpha")
        row.get_by_role("button", name="Pin", exact=True).click()
        eventually(lambda: several.model("alpha")["pinned"])
        row.get_by_role("button", name="Unpin").click()
        eventually(lambda: not several.model("alpha")["pinned"])
        assert "of 1.20 GiB held" in card.inner_text()


def test_models_that_need_the_same_memory_take_turns_and_stay_for_a_while(several: Several) -> None:
    """One of the places is pinned, the classifier has another, and two clients want different models in the third."""
    for name in ("alpha", "classifier"):
        several.order(name, "pin")
        eventually(lambda name=name: several.state(name), lambda state: state == "loaded")
    stop, answers, early = threading.Event(), {"beta": 0, "gamma": 0}, list[str]()

    def use(name: str) -> None:
        while not stop.is_set():
            answers[name] += several.chat(name)[0] == 200

    clients = [threading.Thread(target=use, args=(name,)) for name in answers]
    for client in clients:
        client.start()
    loaded_at: dict[str, float] = {}

    def look() -> int:
        found = several.ask("GET", "/v1/penstock/models")[1]
        for model in found["models"]:
            if model["state"] == "loaded":
                loaded_at[model["name"]] = model["loaded_at"]
            elif found["at"] < loaded_at.pop(model["name"], 0.0) + MIN_RESIDENCE_S:
                early.append(model["name"])
        return min(model["loads"] for model in found["models"] if model["name"] in answers)

    before = look()
    eventually(look, lambda loads: loads > before)
    stop.set()
    for client in clients:
        client.join(PATIENCE_S)
    assert not early, "they left before the time that they are promised"
    assert min(answers.values()) > 0
    assert several.state("alpha") == "loaded"
    for name in ("alpha", "classifier"):
        several.order(name, "unpin")


def test_an_engine_that_is_killed_comes_back(server: RealServer, several: Several) -> None:
    assert several.chat("alpha")[0] == 200
    engine = engine_of(replica_of(server, "alpha").pid)
    engine.kill()
    assert eventually(lambda: several.chat("alpha")[0], lambda status: status == 200)
    assert engine_of(replica_of(server, "alpha").pid).pid != engine.pid


def test_a_server_that_is_killed_comes_back(server: RealServer, several: Several) -> None:
    replica = replica_of(server, "alpha")
    replica.kill()
    assert eventually(lambda: several.chat("alpha")[0], lambda status: status == 200)
    assert replica_of(server, "alpha").pid != replica.pid


def replica_of(server: RealServer, name: str) -> psutil.Process:
    """The server of its replica, which has a directory named after the model."""
    (found,) = (one for one in _running(server) if any(f"/replicas/{name}-" in word for word in one[1]))
    return found[0]


def _running(server: RealServer) -> Iterator[tuple[psutil.Process, list[str]]]:
    for process in psutil.Process(server.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            yield process, process.cmdline()
