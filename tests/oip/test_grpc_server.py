"""The gRPC port itself: TLS, clients' certificates, and how it ends."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from penstock.core.errors import ConfigError
from penstock.http.asgi import AsgiApp
from penstock.oip.calls import Calls
from penstock.oip.over_grpc import GrpcPort, OverGrpc
from tests.certificates import Certificate, new_ca
from tests.clocks import ManualClock
from tests.oip.opened import Ports, opened
from tests.oip.triton import Stream
from tests.server.replica import NAME, Replica
from tests.waiting import GIVE_UP_S, eventually


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return new_ca(tmp_path_factory.mktemp("ca"))


def _is_live(ports: Ports, **files: Any) -> bool:
    read = {name: str(path) for name, path in files.items()}
    client = tritonclient.grpc.InferenceServerClient(f"localhost:{ports.grpc}", ssl=True, **read)
    with contextlib.closing(client):
        try:
            return bool(client.is_server_live(client_timeout=GIVE_UP_S))
        except tritonclient.grpc.InferenceServerException as error:
            if error.status() == "StatusCode.UNAVAILABLE":
                return False
            raise


def test_certificate_is_http_s_and_read_again(replica: Replica, ca: Certificate, tmp_path: Path) -> None:
    own = ca.issue("server")
    with opened(replica.loop, AsgiApp(replica.app), tls_cert=str(own.cert), tls_key=str(own.key)) as ports:
        assert _is_live(ports, root_certificates=ca.cert)
        other = new_ca(tmp_path)
        assert not _is_live(ports, root_certificates=other.cert)
        renewed = other.issue("renewed")
        own.key.write_bytes(renewed.key.read_bytes())
        own.cert.write_bytes(renewed.cert.read_bytes())
        assert _is_live(ports, root_certificates=other.cert)


def test_clients_need_a_certificate_where_a_client_ca_is_set(replica: Replica, ca: Certificate) -> None:
    own, theirs = ca.issue("mutual"), ca.issue("client")
    files = {"tls_cert": str(own.cert), "tls_key": str(own.key), "client_ca": str(ca.cert)}
    with opened(replica.loop, AsgiApp(replica.app), **files) as ports:
        assert not _is_live(ports, root_certificates=ca.cert)
        assert _is_live(ports, root_certificates=ca.cert, private_key=theirs.key, certificate_chain=theirs.cert)


def test_extra_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    monkeypatch.delitem(sys.modules, "penstock.oip.over_grpc")
    with pytest.raises(ConfigError, match=r"penstock\[grpc\]") as refused:
        importlib.import_module("penstock.oip.over_grpc")
    assert refused.value.param == "grpc_port"


async def test_port_in_use_is_a_configuration_error(ports: Ports) -> None:
    second = OverGrpc(Calls(lambda exchange: None), GrpcPort("127.0.0.1", ports.grpc))
    with pytest.raises(ConfigError) as refused:
        await second.listen()
    assert refused.value.param == "grpc_port"


def test_stop_lets_requests_finish_and_ends_idle_streams(slow_replica: Replica) -> None:
    with opened(slow_replica.loop, AsgiApp(slow_replica.app)) as ports, contextlib.closing(ports.grpc_client) as client:
        channel = grpc.insecure_channel(f"127.0.0.1:{ports.grpc}")
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=GIVE_UP_S)
        assert next(watch).status == 1
        stream = Stream(client)
        stream.ask("the fox", 40, "a", parameters={"ignore_eos": True})
        pieces = [stream.next()]
        ports.run(ports.grpc_server.stop(GIVE_UP_S))  # returns when all calls have ended
        pieces += stream.until_final()["a"]
        assert pieces[-1].as_numpy("finish_reason")[0] == b"length"
        with pytest.raises(tritonclient.grpc.InferenceServerException) as ended:
            stream.next()
        assert ended.value.status() == "StatusCode.UNAVAILABLE"
        assert [one.status for one in watch] == [2]
        channel.close()


def test_client_that_takes_nothing_is_given_up(replica: Replica) -> None:
    def requests() -> Iterator[service_pb2.ModelInferRequest]:
        """Together they are answered with more than is sent ahead of a reader."""
        for _ in range(200):
            asked = service_pb2.ModelInferRequest(model_name=NAME)
            asked.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"x" * 1000)
            asked.parameters["max_tokens"].int64_param = 1
            asked.parameters["exclude_input_in_output"].bool_param = False
            yield asked

    clock = ManualClock()
    options = [("grpc.http2.bdp_probe", 0)]
    with opened(replica.loop, AsgiApp(replica.app), clock=clock) as ports:

        async def pass_time() -> None:
            clock.advance(5.0)

        with grpc.insecure_channel(f"127.0.0.1:{ports.grpc}", options) as channel:
            call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(requests(), timeout=GIVE_UP_S)
            eventually(lambda: ports.grpc_server.num_streams)

            def num_streams() -> int:
                ports.run(pass_time())
                return ports.grpc_server.num_streams

            eventually(num_streams, lambda found: not found)
            with pytest.raises(grpc.RpcError) as ended:
                list(call)
            assert ended.value.code() is grpc.StatusCode.ABORTED
    eventually(replica.is_idle)
