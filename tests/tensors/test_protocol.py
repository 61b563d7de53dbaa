"""The Open Inference Protocol with tensors, by tritonclient: at a replica and at a gateway, over HTTP and over gRPC."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from onnx import TensorProto
from tritonclient.utils import InferenceServerException

from penstock.gateway.settings.gateway import ModelSettings as PoolSettings
from penstock.oip.tensor_relay import TensorRelay
from tests.gateway.running import RunningGateway, running_gateway
from tests.oip.opened import Ports, opened
from tests.oip.triton import Stream
from tests.tensors.models import classify, save_classifier, save_echo
from tests.tensors.serving import Served, call, serving
from tests.waiting import eventually

NAME, RENAMED = "classifier", "sorter"
SETTINGS = """
name: "classifier"
backend: "onnxruntime"
max_batch_size: 8
version_policy: { all { } }
dynamic_batching { preferred_batch_size: [ 4 ], priority_levels: 2, default_priority_level: 2 }
"""
ROWS = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("models") / NAME
    for number in (1, 2):
        save_classifier(path / str(number) / "model.onnx", seed=number)
    (path / "config.pbtxt").write_text(SETTINGS)
    with serving(path) as found:
        yield found


@pytest.fixture(scope="module")
def gateway(served: Served) -> Iterator[RunningGateway]:
    pools = {NAME: PoolSettings(replicas=[served.url]), RENAMED: PoolSettings(replicas=[served.url], served_as=NAME)}
    with running_gateway(pools=pools) as found:
        eventually(lambda: found.app.takes_tensors(RENAMED) and found.app.can_serve(RENAMED))
        yield found


@pytest.fixture(scope="module")
def front(gateway: RunningGateway) -> Iterator[Ports]:
    app = gateway.app
    relay = TensorRelay(app, app.takes_tensors, app.can_serve)
    with opened(gateway.loop, app, app, app.can_serve, tensors=relay) as found:
        yield found


@pytest.fixture(params=["replica", "gateway", "gateway, renamed"])
def place(request: pytest.FixtureRequest, served: Served, front: Ports) -> tuple[Ports, str]:
    """Ports, and the model's name there."""
    return {"replica": (served.ports, NAME), "gateway": (front, NAME)}.get(request.param, (front, RENAMED))


@pytest.fixture(params=["grpc", "http"])
def client(request: pytest.FixtureRequest, place: tuple[Ports, str]) -> Iterator[tuple[Any, Any, str]]:
    """A client, the module it is of, and the model's name."""
    ports, name = place
    kind = tritonclient.grpc if request.param == "grpc" else tritonclient.http
    with contextlib.closing(ports.grpc_client if request.param == "grpc" else ports.http_client) as found:
        yield found, kind, name


def _input(kind: Any, rows: np.ndarray, **options: Any) -> Any:
    found = kind.InferInput("x", list(rows.shape), "FP32")
    found.set_data_from_numpy(rows, **options)
    return found


def test_model_answers_and_tells_what_it_is(client: tuple[Any, Any, str]) -> None:
    asked, kind, name = client
    result = asked.infer(name, [_input(kind, ROWS)], request_id="7")
    assert np.allclose(result.as_numpy("probabilities"), classify(ROWS, seed=2), atol=1e-6)
    first = asked.infer(
        name, [_input(kind, ROWS)], "1", outputs=[kind.InferRequestedOutput("probabilities")], priority=1, timeout=10**9
    )
    assert np.allclose(first.as_numpy("probabilities"), classify(ROWS, seed=1), atol=1e-6)

    options = {"as_json": True} if kind is tritonclient.grpc else {}
    metadata = asked.get_model_metadata(name, **options)
    assert (metadata["name"], metadata["versions"]) == (name, ["1", "2"])
    assert [int(size) for size in metadata["inputs"][0]["shape"]] == [-1, 4]
    config = asked.get_model_config(name, **options)
    config = config.get("config", config)
    assert config["max_batch_size"] == 8
    assert config["input"][0]["data_type"] == "TYPE_FP32"
    assert config["dynamic_batching"]["preferred_batch_size"] == [4]
    (found,) = asked.get_inference_statistics(name, "1", **options)["model_stats"]
    assert (found["version"], int(found["execution_count"]) > 0) == ("1", True)
    assert int(found["inference_stats"]["queue"]["count"]) == int(found["inference_stats"]["success"]["count"])

    assert asked.is_model_ready(name)
    assert asked.is_model_ready(name, "1")
    assert not asked.is_model_ready(name, "7")
    assert not asked.is_model_ready("nobody")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"inputs": []}, "the input 'x' is missing"),
        ({"model_version": "7"}, "has no version '7'; it has 1, 2"),
        ({"outputs": ["y"]}, "'y' is no output of this model"),
        ({"priority": 9}, "priority"),
        ({"sequence_id": 5, "sequence_start": True}, "sequence_"),
    ],
)
def test_wrong_request_is_refused_with_the_reason(
    client: tuple[Any, Any, str], change: dict[str, Any], why: str
) -> None:
    asked, kind, name = client
    if "outputs" in change:
        change = {"outputs": [kind.InferRequestedOutput(one) for one in change["outputs"]]}
    with pytest.raises(InferenceServerException, match=why) as refused:
        asked.infer(name, **({"inputs": [_input(kind, ROWS)]} | change))
    assert refused.value.status() in ("400", "404", "StatusCode.INVALID_ARGUMENT", "StatusCode.NOT_FOUND")


def test_values_may_come_as_json(place: tuple[Ports, str]) -> None:
    ports, name = place
    asked = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [3, 4], "data": ROWS.tolist()}], "id": "a"}
    status, answer = call(ports, "POST", f"/v2/models/{name}/versions/1/infer", asked)
    assert (status, answer["id"], answer["model_version"]) == (200, "a", "1")
    assert np.allclose(answer["outputs"][0]["data"], classify(ROWS, seed=1).flatten(), atol=1e-6)
    status, answer = call(ports, "POST", f"/v2/models/{name}/infer", asked | {"inputs": 5})
    assert (status, answer["code"]) == (400, "invalid_request")
    assert call(ports, "POST", f"/v2/models/{name}/infer", b"")[0] == 400
    assert call(ports, "POST", f"/v2/models/{name}/generate", {"text_input": "x"})[0] in (400, 404)


def test_stream_answers_each_request(place: tuple[Ports, str]) -> None:
    ports, name = place
    with contextlib.closing(ports.grpc_client) as client:
        stream = Stream(client)
        for number in range(3):
            client.async_stream_infer(
                name, [_input(tritonclient.grpc, ROWS[number : number + 1])], request_id=str(number)
            )
        found = [stream.next() for _ in range(3)]
        for one in found:
            number = int(one.get_response().id)
            assert np.allclose(one.as_numpy("probabilities"), classify(ROWS[number : number + 1], 2), atol=1e-6)
            assert one.get_response().parameters["triton_final_response"].bool_param


def test_texts_and_small_numbers_pass_through(tmp_path: Path) -> None:
    path = save_echo(tmp_path / "echo.onnx", {"text": TensorProto.STRING, "half": TensorProto.FLOAT16})
    texts, halves = np.array([[b"a", "ü".encode()]], object), np.array([[0.5, 1.5]], np.float16)
    with serving(path) as served:
        for kind, client in (
            (tritonclient.grpc, served.ports.grpc_client),
            (tritonclient.http, served.ports.http_client),
        ):
            with contextlib.closing(client):
                text, half = kind.InferInput("text", [1, 2], "BYTES"), kind.InferInput("half", [1, 2], "FP16")
                text.set_data_from_numpy(texts)
                half.set_data_from_numpy(halves)
                result = client.infer("echo", [text, half])
                assert result.as_numpy("out_text").tolist() == texts.tolist()
                assert result.as_numpy("out_half").tolist() == halves.tolist()


def test_gateway_counts_and_limits_calls_as_other_requests(gateway: RunningGateway, front: Ports) -> None:
    key = gateway.add_tenant("acme", limits={"requests_per_minute": 1})
    asked = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
    path = f"/v2/models/{NAME}/infer"
    assert call(front, "POST", path, asked, authorization="Bearer psk_wrong")[0] == 401
    assert call(front, "POST", path, asked, authorization=f"Bearer {key}")[0] == 200
    status, answer = call(front, "POST", path, asked, authorization=f"Bearer {key}")
    assert (status, answer.get("code")) == (429, "rate_limited"), answer
    assert 'surface="tensors"' in gateway.metrics()


def test_metrics_health_and_report(served: Served) -> None:
    assert served.call("GET", "/health")[0] == 200
    assert served.call("GET", "/ready")[0] == 200
    assert served.call("GET", "/v1/models")[1]["data"][0]["id"] == NAME
    assert served.call("GET", "/v1/models/nobody")[0] == 404
    report = served.call("GET", "/v1/penstock/snapshot")[1]
    assert (report["model"], report["state"], report["takes_tensors"]) == (NAME, "ready", True)
    assert [(one[0], one[1], one[4]) for one in report["tensors"]] == [(NAME, 1, 8), (NAME, 2, 8)]
    assert served.call("GET", "/health/deep")[0] == 200
    text = served.call("GET", "/metrics")[1].decode()
    for wanted in (
        f'penstock_tensor_requests_total{{model="{NAME}",version="2",outcome="ok"}}',
        f'penstock_tensor_batch_size_bucket{{model="{NAME}",version="1",le="8"}}',
        f'penstock_tensor_instances{{model="{NAME}",version="1",device="cpu"}} 1',
    ):
        assert wanted in text


def test_drained_replica_takes_nothing(classifier: Path) -> None:
    asked = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
    with serving(classifier) as served:
        assert served.call("POST", "/v1/penstock/drain", {})[1]["is_draining"]
        status, answer = served.call("POST", f"/v2/models/{NAME}/infer", asked)
        assert (status, answer["code"]) == (503, "engine_unavailable")
        assert served.call("GET", f"/v2/models/{NAME}/ready")[0] == 503
        served.call("DELETE", "/v1/penstock/drain")
        assert served.call("POST", f"/v2/models/{NAME}/infer", asked)[0] == 200
