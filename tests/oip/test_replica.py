"""The Open Inference Protocol at a replica, by tritonclient: over gRPC and over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from tests.oip.opened import MAX_BODY_BYTES, Ports
from tests.oip.triton import Stream, inputs, joined, tensor, texts
from tests.server.replica import NAME, SEED, Replica
from tests.waiting import GIVE_UP_S, eventually

SERVICE = "inference.GRPCInferenceService"


@pytest.fixture(params=["grpc", "http"])
def client(request: pytest.FixtureRequest, ports: Ports) -> Iterator[tuple[Any, Any]]:
    """A client, and the module it is of."""
    if request.param == "grpc":
        with contextlib.closing(ports.grpc_client) as found:
            yield found, tritonclient.grpc
    else:
        with contextlib.closing(ports.http_client) as found:
            yield found, tritonclient.http


def _call(ports: Ports, method: str, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", ports.http, timeout=GIVE_UP_S)
    with contextlib.closing(connection):
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, data, headers)
        response = connection.getresponse()
        content = response.read()
        is_json = response.headers.get("content-type") == "application/json"
        return response.status, json.loads(content) if is_json else content


def test_server_and_model_tell_what_they_are(client: tuple[Any, Any]) -> None:
    asked, _ = client
    assert asked.is_server_live()
    assert asked.is_server_ready()
    assert asked.is_model_ready(NAME)
    assert asked.is_model_ready(NAME, "1")
    assert not asked.is_model_ready("nobody")
    assert not asked.is_model_ready(NAME, "7")

    found = asked.get_server_metadata()
    server = found if isinstance(found, dict) else {"name": found.name, "extensions": list(found.extensions)}
    assert server["name"] == "penstock"
    assert "binary_tensor_data" in server["extensions"]

    found = asked.get_model_metadata(NAME)
    if not isinstance(found, dict):
        found = {"versions": found.versions, "inputs": found.inputs, "outputs": found.outputs}
        found |= {key: [{"name": t.name, "datatype": t.datatype} for t in found[key]] for key in ("inputs", "outputs")}
    assert list(found["versions"]) == ["1"]
    assert found["inputs"][0]["name"] == "text_input"
    assert {"text_output", "finish_reason"} == {one["name"] for one in found["outputs"]}
    with pytest.raises(InferenceServerException, match="nobody"):
        asked.get_model_metadata("nobody")


def test_inference_answers_as_completions_do(client: tuple[Any, Any], replica: Replica) -> None:
    asked, kind = client
    result = asked.infer(NAME, inputs(kind, "the quick fox", 8), request_id="mine")
    assert texts(result) == [replica.answer("the quick fox", 8, seed=SEED)]
    response = result.get_response()
    assert (response["id"] if isinstance(response, dict) else response.id) == "mine"

    parameters = {"max_tokens": 8, "seed": SEED}
    assert texts(asked.infer(NAME, [tensor(kind, "text_input", ["the quick fox"])], parameters=parameters)) == [
        replica.answer("the quick fox", 8, seed=SEED)
    ]


def test_batch_of_texts_is_answered_in_its_own_shape(client: tuple[Any, Any], replica: Replica) -> None:
    asked, kind = client
    prompts = ["one", "two foxes", "three"]
    batch = [tensor(kind, "text_input", prompts, shape=[3, 1]), tensor(kind, "max_tokens", [5], "INT32", [1, 1])]
    result = asked.infer(NAME, batch, outputs=[kind.InferRequestedOutput("text_output")])
    assert result.as_numpy("text_output").shape == (3, 1)
    assert texts(result) == [replica.answer(prompt, 5, seed=SEED) for prompt in prompts]
    assert result.as_numpy("finish_reason") is None


def test_tensors_and_parameters_reach_the_model(client: tuple[Any, Any], replica: Replica) -> None:
    asked, kind = client
    whole = replica.answer("the fox", 12, seed=SEED)
    stop = whole[3:6]
    more = [tensor(kind, "stop_words", [stop]), tensor(kind, "exclude_input_in_output", [False], "BOOL")]
    result = asked.infer(NAME, inputs(kind, "the fox", 12, *more))
    assert texts(result) == ["the fox" + whole[: whole.index(stop)]]
    assert texts(result, "finish_reason") == ["stop"]

    sampling = tensor(kind, "sampling_parameters", [json.dumps({"max_tokens": 3, "ignore_eos": True})])
    result = asked.infer(NAME, [tensor(kind, "text_input", ["the fox"]), sampling])
    assert texts(result, "finish_reason") == ["length"]


@pytest.mark.parametrize(
    ("more", "parameters", "named"),
    [
        ([("temprature", [1.0], "FP32")], {}, "did you mean 'temperature'"),
        ([("max_tokens", [2, 3], "INT32")], {}, "max_tokens has 2 elements"),
        ([("temperature", [9.0], "FP32")], {}, "temperature"),
        ([("top_p", [float("nan")], "FP32")], {}, "top_p: a value is not a finite number"),
        ([("stream", [True], "BOOL")], {}, "stream"),
        ([("seed", [1], "INT64")], {"random_seed": 2}, "seed is given twice"),
        ([], {"best_of": 3}, "best_of"),
        ([("text_input", ["again"], "BYTES")], {}, "text_input is given twice"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    client: tuple[Any, Any], more: list[Any], parameters: dict[str, Any], named: str
) -> None:
    asked, kind = client
    given = [tensor(kind, "text_input", ["the fox"]), *(tensor(kind, *one) for one in more)]
    with pytest.raises(InferenceServerException, match=named) as refused:
        asked.infer(NAME, given, parameters=parameters)
    assert refused.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")


def test_unknown_outputs_and_models_are_refused(client: tuple[Any, Any]) -> None:
    asked, kind = client
    with pytest.raises(InferenceServerException, match="logits"):
        asked.infer(NAME, inputs(kind, "x", 2), outputs=[kind.InferRequestedOutput("logits")])
    with pytest.raises(InferenceServerException, match="nobody") as refused:
        asked.infer("nobody", inputs(kind, "x", 2))
    assert refused.value.status() in ("404", "StatusCode.NOT_FOUND")
    with pytest.raises(InferenceServerException, match="text_input is missing"):
        asked.infer(NAME, [tensor(kind, "max_tokens", [2], "INT32")])


def test_stream_comes_in_pieces_and_says_which_is_the_last(slow_ports: Ports, slow_replica: Replica) -> None:
    with contextlib.closing(slow_ports.grpc_client) as asked:
        stream = Stream(asked)
        stream.ask("the fox", 6, "one", enable_empty_final_response=True)
        (pieces,) = stream.until_final().values()
        assert joined(pieces) == slow_replica.answer("the fox", 6, seed=SEED)
        assert len(pieces) > 2
        assert [texts(piece, "finish_reason")[0] for piece in pieces][-2:] == ["", "length"]


def test_requests_on_one_stream_are_answered_side_by_side_and_fail_alone(ports: Ports, replica: Replica) -> None:
    with contextlib.closing(ports.grpc_client) as asked:
        stream = Stream(asked)
        for number in range(8):
            stream.ask(f"fox {number}", 4 + number, f"r{number}", streams=number % 2 == 0)
        found = stream.until_final(8)
        assert {name: joined(pieces) for name, pieces in found.items()} == {
            f"r{number}": replica.answer(f"fox {number}", 4 + number, seed=SEED) for number in range(8)
        }
        assert len(found["r1"]) == 1

        stream.ask("fox", 0, "bad")
        with pytest.raises(InferenceServerException, match=r"\[request id: bad\] .*max_tokens"):
            stream.next()
        stream.ask("fox", 3, "good")
        assert joined(stream.until_final()["good"]) == replica.answer("fox", 3, seed=SEED)


def test_failure_on_a_stream_has_its_code(ports: Ports) -> None:
    channel = grpc.insecure_channel(f"127.0.0.1:{ports.grpc}")
    with channel:
        stub = tritonclient.grpc.service_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = service_pb2.ModelInferRequest(model_name="nobody", id="7")
        (answer,) = stub.ModelStreamInfer(iter([request]), timeout=GIVE_UP_S)
        assert "text_input is missing" in answer.error_message
        assert answer.infer_response.id == "7"
        assert answer.infer_response.parameters["code"].string_param == "invalid_request"
        assert answer.infer_response.parameters["triton_final_response"].bool_param


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_call_that_is_given_up_stops_the_sequence(slow_ports: Ports, slow_replica: Replica, how: str) -> None:
    with contextlib.closing(slow_ports.grpc_client) as asked:
        kind = tritonclient.grpc
        endless = inputs(kind, "the fox", 2000, tensor(kind, "ignore_eos", [True], "BOOL"))
        errors: list[Any] = []
        call = asked.async_infer(
            NAME,
            endless,
            callback=lambda result, error: errors.append(error),
            client_timeout=GIVE_UP_S if how == "cancel" else 0.2,
        )
        if how == "cancel":
            eventually(lambda: slow_replica.engine.num_open)
            call.cancel()
        eventually(lambda: errors)
        assert errors[0].status() in ("StatusCode.CANCELLED", "StatusCode.DEADLINE_EXCEEDED")
        eventually(slow_replica.is_idle)


def test_stream_that_its_client_leaves_stops_its_sequences(slow_ports: Ports, slow_replica: Replica) -> None:
    with contextlib.closing(slow_ports.grpc_client) as asked:
        stream = Stream(asked)
        more = {"parameters": {"ignore_eos": True}}
        stream.ask("the fox", 2000, "a", **more)
        stream.ask("the dog", 2000, "b", **more)
        seen = {stream.next().get_response().id for _ in range(8)}
        assert seen <= {"a", "b"}
        asked.stop_stream(cancel_requests=True)
        eventually(slow_replica.is_idle)


def test_generate_over_http(ports: Ports, replica: Replica) -> None:
    asked = {"id": "x", "text_input": "the fox", "parameters": {"max_tokens": 5}}
    status, found = _call(ports, "POST", f"/v2/models/{NAME}/versions/1/generate", asked)
    assert (status, found) == (
        200,
        {
            "id": "x",
            "model_name": NAME,
            "model_version": "1",
            "text_output": replica.answer("the fox", 5, seed=SEED),
            "finish_reason": found["finish_reason"],
        },
    )
    asked = {"text_input": "the fox", "max_tokens": 5, "stop_words": ["zzz"]}  # as Triton's users write it
    assert _call(ports, "POST", f"/v2/models/{NAME}/generate", asked)[1]["text_output"] == found["text_output"]


def test_generate_stream_over_http(ports: Ports, replica: Replica) -> None:
    asked = {"text_input": "the fox", "parameters": {"max_tokens": 5, "ignore_eos": True}}
    status, content = _call(ports, "POST", f"/v2/models/{NAME}/generate_stream", asked)
    assert status == 200
    events = [json.loads(line.removeprefix("data: ")) for line in content.decode().split("\n\n") if line]
    whole = _call(ports, "POST", f"/v2/models/{NAME}/generate", asked)[1]
    assert "".join(event["text_output"] for event in events) == whole["text_output"]
    assert events[-1]["finish_reason"] == "length"
    status, content = _call(ports, "POST", f"/v2/models/{NAME}/generate_stream", asked | {"stream": False})
    assert json.loads(content.decode().removeprefix("data: "))["text_output"] == whole["text_output"]


def test_http_refuses_in_the_form_that_tritons_clients_read(ports: Ports) -> None:
    generate = f"/v2/models/{NAME}/generate"
    cases: list[tuple[str, str, Any, int, str]] = [
        ("POST", generate, {"text_input": 3}, 400, "text_input"),
        ("POST", generate, {"text_input": "x", "details": True}, 400, "details"),
        ("POST", generate, {"text_input": "x", "stream": True}, 400, "stream"),
        ("POST", generate, b"[1]", 400, "object"),
        ("POST", generate, b"{", 400, "JSON"),
        ("POST", "/v2/models/nobody/generate", {"text_input": "x"}, 404, "nobody"),
        ("GET", generate, None, 405, "POST"),
        ("GET", "/v2/health/nothing", None, 404, "no such path"),
        ("GET", "/v2/models/nobody/ready", None, 404, "nobody"),
        ("POST", generate, b'{"text_input":"' + b"x" * (9 << 20), 413, "larger"),
    ]
    for method, path, body, status, named in cases:
        found, answer = _call(ports, method, path, body)
        assert (found, named in answer["error"]) == (status, True), (path, answer)


def test_other_apis_under_the_same_prefix_stay_what_they_are(ports: Ports) -> None:
    status, answer = _call(ports, "POST", "/v2/rerank", {"model": NAME, "query": "fox", "documents": ["a fox"]})
    assert (status, len(answer["results"])) == (200, 1)


def test_json_inference_without_the_binary_extension(ports: Ports, replica: Replica) -> None:
    body = {
        "id": "j",
        "inputs": [
            {"name": "text_input", "shape": [2, 1], "datatype": "BYTES", "data": [["one"], ["two"]]},
            {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [4]},
        ],
        "outputs": [{"name": "text_output"}],
    }
    status, found = _call(ports, "POST", f"/v2/models/{NAME}/infer", body)
    assert status == 200
    assert found["outputs"] == [
        {
            "name": "text_output",
            "datatype": "BYTES",
            "shape": [2, 1],
            "data": [replica.answer("one", 4, seed=SEED), replica.answer("two", 4, seed=SEED)],
        }
    ]


def test_health_checks_and_reflection_by_their_own_clients(ports: Ports) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE):
            assert health.Check(health_pb2.HealthCheckRequest(service=service), timeout=GIVE_UP_S).status == 1
        with pytest.raises(grpc.RpcError) as refused:
            health.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=GIVE_UP_S)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=GIVE_UP_S)
        assert next(watch).status == 1
        watch.cancel()

        reflected = ProtoReflectionDescriptorDatabase(channel)
        assert {SERVICE, "grpc.health.v1.Health"} <= set(reflected.get_services())
        file = reflected.FindFileContainingSymbol(f"{SERVICE}.ModelStreamInfer")
        assert "ModelInferRequest" in [one.name for one in file.message_type]
        with pytest.raises(KeyError):
            reflected.FindFileByName("nothing.proto")


def test_message_beyond_the_limit_and_compressed_ones_are_refused(ports: Ports) -> None:
    kind = tritonclient.grpc
    with contextlib.closing(ports.grpc_client) as asked:
        with pytest.raises(InferenceServerException) as refused:
            asked.infer(NAME, inputs(kind, "x" * (MAX_BODY_BYTES + (128 << 10)), 2))
        assert refused.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
        with pytest.raises(InferenceServerException) as refused:
            asked.infer(NAME, inputs(kind, "x" * 4096, 2), compression_algorithm="gzip")
        assert refused.value.status() == "StatusCode.UNIMPLEMENTED"


def test_compressed_body_is_refused_by_name(ports: Ports) -> None:
    with contextlib.closing(ports.http_client) as asked, pytest.raises(InferenceServerException, match="content-enc"):
        asked.infer(NAME, inputs(tritonclient.http, "x", 2), request_compression_algorithm="gzip")


def test_statistics_and_configuration_are_of_models_that_take_tensors(client: tuple[Any, Any]) -> None:
    asked, _ = client
    for call in (asked.get_inference_statistics, asked.get_model_config):
        with pytest.raises(InferenceServerException, match="no model that takes tensors") as refused:
            call(NAME)
        assert refused.value.status() in ("404", "StatusCode.NOT_FOUND")


def test_numpy_shapes_that_are_no_texts_are_refused(client: tuple[Any, Any]) -> None:
    asked, kind = client
    for shape in ([1, 2], [1, 1, 2], [2, 2]):
        given = kind.InferInput("text_input", shape, "BYTES")
        given.set_data_from_numpy(np.full(shape, b"x", dtype=np.object_))
        with pytest.raises(InferenceServerException, match="text_input has the shape"):
            asked.infer(NAME, [given])


def test_a_server_of_one_model_has_an_index_and_loads_and_unloads_nothing(client: tuple[Any, Any]) -> None:
    asked, kind = client
    index = asked.get_model_repository_index(**({"as_json": True} if kind is tritonclient.grpc else {}))
    (model,) = index["models"] if kind is tritonclient.grpc else index
    assert (model["name"], model["version"], model["state"]) == (NAME, "1", "READY")
    for call in (asked.load_model, asked.unload_model):
        with pytest.raises(InferenceServerException, match="neither loaded nor unloaded here"):
            call(NAME)
    with pytest.raises(InferenceServerException, match="config: models and their settings come from"):
        asked.load_model(NAME, config="{}")


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "index", b'{"ready": "yes"}', 400),
        ("POST", "index", b'{"all": true}', 400),
        ("POST", f"models/{NAME}/load", b"{", 400),
        ("POST", f"models/{NAME}/load", b'{"parameters": {"file:1/model.onnx": "eA=="}}', 400),
        ("GET", "index", None, 405),
        ("GET", f"models/{NAME}/unload", None, 405),
        ("POST", f"models/{NAME}/start", None, 404),
        ("POST", "models//load", None, 404),
    ],
)
def test_what_is_wrong_with_a_repository_call_is_said(
    ports: Ports, method: str, path: str, body: bytes | None, status: int
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", ports.http)
    with contextlib.closing(connection):
        connection.request(method, f"/v2/repository/{path}", body)
        answer = connection.getresponse()
        assert (answer.status, "error" in json.loads(answer.read())) == (status, True)
