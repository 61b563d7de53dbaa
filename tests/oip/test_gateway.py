"""The Open Inference Protocol at a gateway: keys, limits, failover and engines of others are as over /v1."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import tritonclient.grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from penstock.gateway.settings.gateway import ModelSettings
from tests.dialects.servers import WORDS, FakeVllm
from tests.gateway.running import RunningGateway, running_gateway, slow_and_fast
from tests.oip.opened import Ports, opened
from tests.oip.triton import Stream, inputs, joined, tensor, texts
from tests.server.replica import NAME, Replica, engines_paused
from tests.waiting import GIVE_UP_S, eventually

KIND = tritonclient.grpc


@contextlib.contextmanager
def opened_at(gateway: RunningGateway) -> Iterator[Ports]:
    with opened(gateway.loop, gateway.app, gateway.app, gateway.app.can_serve) as found:
        yield found


@pytest.fixture(scope="module")
def gateway(slow_replica: Replica) -> Iterator[RunningGateway]:
    with running_gateway(slow_replica) as found:
        yield found


@pytest.fixture(scope="module")
def front(gateway: RunningGateway) -> Iterator[Ports]:
    with opened_at(gateway) as found:
        yield found


@pytest.fixture(scope="module")
def key(gateway: RunningGateway) -> str:
    return gateway.add_tenant("acme", limits={"concurrency": 1})


def _request(text: str = "the fox", **parameters: int) -> service_pb2.ModelInferRequest:
    asked = service_pb2.ModelInferRequest(model_name=NAME)
    asked.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(text.encode())
    for name, value in parameters.items():
        asked.parameters[name].int64_param = value
    return asked


def test_keys_and_limits_are_those_of_http(
    gateway: RunningGateway, front: Ports, key: str, slow_replica: Replica
) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{front.grpc}") as channel:
        ask = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for wrong in ((), (("authorization", "Bearer psk_wrong"),)):
            for call, request in ((ask.ModelInfer, _request()), (ask.ServerMetadata, None)):
                with pytest.raises(grpc.RpcError) as refused:
                    call(request or service_pb2.ServerMetadataRequest(), metadata=wrong, timeout=GIVE_UP_S)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        for own in (("authorization", f"Bearer {key}"), ("x-api-key", key)):
            _, call = ask.ModelInfer.with_call(_request(max_tokens=3), metadata=(own,), timeout=GIVE_UP_S)
            assert dict(call.trailing_metadata())["x-request-id"]

        own = (("authorization", f"Bearer {key}"),)
        with engines_paused([slow_replica]):
            waiting = ask.ModelInfer.future(_request(max_tokens=3), metadata=own, timeout=GIVE_UP_S)
            eventually(lambda: gateway.app.admission.num_open)
            with pytest.raises(grpc.RpcError) as refused:
                ask.ModelInfer(_request(), metadata=own, timeout=GIVE_UP_S)
            (told,) = ask.ModelStreamInfer(iter([_request()]), metadata=own, timeout=GIVE_UP_S)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailing = dict(refused.value.trailing_metadata())
        assert trailing["x-penstock-error-reason"] == "concurrency"
        assert int(trailing["grpc-retry-pushback-ms"]) == 1000 * int(trailing["retry-after"]) >= 1000
        assert told.infer_response.parameters["reason"].string_param == "concurrency"
        assert told.infer_response.parameters["retry_after"].int64_param >= 1
        assert waiting.result().outputs[0].name == "text_output"
    eventually(lambda: len(gateway.ledger.usages) == 3)
    assert {usage.tenant_id for usage in gateway.ledger.usages} == {"acme"}
    assert [usage.output_tokens for usage in gateway.ledger.usages] == [3, 3, 3]


def test_wrong_key_is_answered_before_the_body_comes(gateway: RunningGateway, front: Ports, key: str) -> None:
    def ask(offered: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", front.http, timeout=GIVE_UP_S)
        with contextlib.closing(connection):
            connection.putrequest("POST", f"/v2/models/{NAME}/generate")
            connection.putheader("authorization", f"Bearer {offered}")
            connection.putheader("content-length", "5000000")
            connection.endheaders()
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    status, answer = ask("wrong")
    assert (status, answer["code"]) == (401, "unauthenticated")
    assert 'reason="unauthenticated"' in gateway.metrics()


def test_client_that_leaves_is_not_worked_for(gateway: RunningGateway, front: Ports, key: str) -> None:
    with contextlib.closing(front.grpc_client) as client:
        stop = tensor(KIND, "ignore_eos", [True], "BOOL")
        call = client.async_infer(
            NAME, inputs(KIND, "fox", 1500, stop), lambda **_: None, headers={"authorization": f"Bearer {key}"}
        )
        eventually(lambda: gateway.app.admission.num_open)
        call.cancel()
        eventually(gateway.is_idle)


def test_model_is_ready_while_a_replica_is(gateway: RunningGateway, front: Ports, key: str) -> None:
    own = {"authorization": f"Bearer {key}"}
    with contextlib.closing(front.grpc_client) as over_grpc, contextlib.closing(front.http_client) as over_http:

        def ready() -> set[bool]:
            clients: list[Any] = [over_grpc, over_http]
            found = {client.is_server_ready() for client in clients}
            return found | {client.is_model_ready(NAME, headers=own) for client in clients}

        assert ready() == {True}
        assert over_grpc.is_server_live()
        (url,) = gateway.app.replicas
        followed = gateway.app.replicas[url]

        def use(is_in: bool) -> None:
            followed.health.is_in = is_in
            gateway.app.replicas.changed(followed)

        gateway.call(lambda: use(False))
        assert ready() == {False}
        gateway.call(lambda: use(True))
        assert ready() == {True}


def test_stream_goes_on_at_another_replica() -> None:
    with slow_and_fast() as (gateway, slow, fast), opened_at(gateway) as front:
        whole = fast.openai.completions.create(model=NAME, prompt="the fox", max_tokens=30, seed=5)
        with contextlib.closing(front.grpc_client) as client:
            stream = Stream(client)
            stream.ask("the fox", 30, "a", parameters={"seed": 5})
            pieces = [stream.next() for _ in range(3)]
            gateway.set_in_use(fast, True)
            slow.kill_engine()
            pieces += stream.until_final()["a"]
            assert joined(pieces) == whole.choices[0].text


def test_engines_of_others_are_asked_for_completions() -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(FakeVllm(model=NAME))
        gateway = stack.enter_context(running_gateway(pools={NAME: ModelSettings(replicas=[server.url])}))
        client = stack.enter_context(contextlib.closing(stack.enter_context(opened_at(gateway)).grpc_client))
        assert texts(client.infer(NAME, inputs(KIND, "x", 3))) == ["".join(WORDS[:3])]
        stream = Stream(client)
        stream.ask("x", 4, "a")
        assert joined(stream.until_final()["a"]) == "".join(WORDS[:4])
        assert [path for path, _, _ in server.asked] == ["/v1/completions"] * 2
