"""The Endpoint Picker's contract with Envoy, in front of replicas that are real but for the model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue, UInt32Value

from penstock.api.relay import SECRET_HEADER, TENANT_HEADER
from penstock.core.settings import ServerSettings
from penstock.gateway.endpoint_picker.picked_request import PickedRequest
from penstock.gateway.endpoint_picker.picker import EndpointPicker
from penstock.gateway.endpoint_picker.server import EXT_PROC, EndpointPickerServer
from penstock.gateway.endpoint_picker.settings import EndpointPickerSettings
from penstock.gateway.settings.gateway import GatewaySettings, ModelSettings
from penstock.health.settings import HealthSettings
from penstock.health.slow_start import SlowStartSettings
from penstock.router.load import Load
from penstock.router.request import EdgeRequest
from penstock.router.strategies import RoutingSettings, Weights
from tests.certificates import new_ca
from tests.gateway.endpoint_picker.fake_envoy import BUFFERED, DUPLEX, NONE, FakeEnvoy
from tests.gateway.running import RunningGateway, running_gateway
from tests.server.replica import NAME, Replica, engines_paused, serving
from tests.waiting import GIVE_UP_S, eventually

ROUTING_TOKENS = 256  # of a block
# Reports of a busy machine come late, and tell of load that is over.
BY_PREFIX = RoutingSettings(weights=Weights(load=Load(queue=0.0, kv_pressure=0.0, output=0.0)))
SETTINGS = EndpointPickerSettings(port=0, health_port=0, secure=False, max_body_bytes=200_000)


@dataclass
class Picking:
    gateway: RunningGateway
    server: EndpointPickerServer
    envoy: FakeEnvoy

    @property
    def app(self) -> EndpointPicker:
        assert isinstance(self.gateway.app, EndpointPicker)
        return self.gateway.app

    def num_in_flight(self) -> dict[str, int]:
        """By endpoint."""
        found = self.app.replicas.values()
        return {replica.url.removeprefix("http://"): len(replica.in_flight) for replica in found}

    def requests(self) -> list[EdgeRequest]:
        """Those that are at replicas."""
        found = [one for replica in self.app.replicas.values() for one in replica.in_flight]
        return [one.request for one in found if isinstance(one, PickedRequest)]

    def is_quiet(self) -> bool:
        """Nothing is at a replica, and the last reports say so: one that was made in mid-prefill tells of a full
        cache, which outweighs a prefix."""
        return self.gateway.is_idle() and all(one.snapshot.sequences == 0 for one in self.app.replicas.values())

    def num_held(self, where: str, hashes: Sequence[int]) -> int:
        """How many of these blocks the index knows to be at a replica."""
        admission = self.app.admission
        held = self.gateway.call(lambda: admission.router.index.held(hashes, admission.replicas(NAME)))
        return int(held.get(f"http://{where}", 0))

    def health(self, service: str, *, port: int | None = None) -> int:
        with grpc.insecure_channel(f"127.0.0.1:{port or self.server.port}") as channel:
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check", StringValue.SerializeToString, UInt32Value.FromString
            )
            return int(check(StringValue(value=service), timeout=GIVE_UP_S).value)


@contextlib.contextmanager
def picking(*replicas: Replica, settings: EndpointPickerSettings = SETTINGS, **options: Any) -> Iterator[Picking]:
    make = partial(EndpointPicker, GatewaySettings(endpoint_picker=settings))
    health = HealthSettings(slow_start=SlowStartSettings(ramp_s=0))  # which draws lots
    with running_gateway(*replicas, make=make, health=health, **options) as gateway:
        assert isinstance(gateway.app, EndpointPicker)
        server = EndpointPickerServer(gateway.app)

        def run(work: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(work, gateway.loop).result(GIVE_UP_S)

        run(server.listen())
        envoy = FakeEnvoy(server.port)
        try:
            yield Picking(gateway, server, envoy)
        finally:
            envoy.close()
            run(server.stop(0.0))


@pytest.fixture
def epp(two_replicas: list[Replica]) -> Iterator[Picking]:
    with picking(*two_replicas) as found:
        yield found
        eventually(found.gateway.is_idle)


def endpoint(replica: Replica) -> str:
    return f"{replica.host}:{replica.port}"


def asked(prompt: str = "the first", **more: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": prompt, "max_tokens": 5, "temperature": 0, **more}


@pytest.mark.parametrize("mode", [DUPLEX, BUFFERED])
def test_a_request_goes_to_a_replica_and_its_answer_comes_back(
    epp: Picking, two_replicas: list[Replica], mode: int
) -> None:
    request = epp.envoy.ask(asked(), mode=mode)
    assert set(request.endpoints) == set(map(endpoint, two_replicas))  # the second one to fail over to
    assert json.loads(request.body) == asked()
    answer = request.forward()
    assert (answer.status, answer.json["choices"][0]["text"]) == (200, two_replicas[0].answer("the first", 5))
    assert answer.headers["x-penstock-replica"].startswith(NAME)
    eventually(epp.gateway.is_idle)
    assert f'penstock_gateway_tokens_total{{model="{NAME}",kind="output"}} 5' in epp.gateway.metrics()


def test_a_stream_passes_by_as_it_comes(epp: Picking, two_replicas: list[Replica]) -> None:
    answer = epp.envoy.ask(asked(stream=True, max_tokens=20)).forward()
    events = [line.removeprefix(b"data: ") for line in answer.body.split(b"\n\n") if line]
    assert events[-1] == b"[DONE]"
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
    assert text == two_replicas[0].answer("the first", 20)


@pytest.mark.parametrize("num_bytes", [1, 61_999, 62_000, 62_001, 150_000])
def test_a_body_comes_back_in_chunks_that_envoy_takes(epp: Picking, num_bytes: int) -> None:
    body = json.dumps(asked(user="u" * num_bytes)).encode()
    request = epp.envoy.open(content_length=str(len(body)))
    request.ask(body, chunk_bytes=60_000)
    assert request.body == body
    assert all(len(chunk) <= 62_000 for chunk in request.chunks)
    assert len(request.chunks) == -(-len(body) // 62_000)
    request.cancel()


def test_prompts_go_where_their_prefix_is_held() -> None:
    with (
        serving(routing_tokens=ROUTING_TOKENS) as one,
        serving(routing_tokens=ROUTING_TOKENS) as two,
        picking(one, two) as epp,
    ):
        router = epp.app.admission.router
        epp.gateway.call(lambda: router.configure(BY_PREFIX, {}))
        tokens = epp.app.pools[NAME].tokens
        eventually(lambda: tokens.prompt_tokenizer is not None)
        prompts = {endpoint(one): "the fox and the dog " * 130, endpoint(two): "one and the second " * 130}
        for where, prompt in prompts.items():
            request = epp.envoy.ask(asked(prompt), subset=[where])
            assert request.endpoints == [where]
            (hashes,) = [found.hashes for found in epp.requests()]
            assert len(hashes) > 1
            assert request.forward().status == 200
            eventually(partial(epp.num_held, where, hashes), lambda found, wanted=hashes: found == len(wanted))
            eventually(epp.gateway.is_idle)
        for where, prompt in [*prompts.items()] * 3:
            eventually(epp.is_quiet)
            request = epp.envoy.ask(asked(prompt + "and more"))
            assert request.endpoints[0] == where
            assert request.forward().status == 200


def test_a_request_counts_at_its_replica_from_the_pick_until_it_is_over(two_replicas: list[Replica]) -> None:
    with picking(*two_replicas) as epp:
        epp.gateway.call(lambda: epp.app.admission.router.configure(RoutingSettings("least_connections"), {}))
        eventually(epp.is_quiet)
        request = epp.envoy.ask(asked())
        where, other = request.endpoints
        assert epp.num_in_flight() == {where: 1, other: 0}
        second = epp.envoy.ask(asked())
        assert epp.num_in_flight() == {where: 1, other: 1}  # the next one goes where less is to do
        request.cancel()
        eventually(epp.num_in_flight, lambda found: found == {where: 0, other: 1})
        second.forward()
        eventually(epp.gateway.is_idle)


def test_a_request_that_is_cancelled_in_the_middle_of_its_answer_is_over(epp: Picking) -> None:
    request = epp.envoy.ask(asked(stream=True, max_tokens=500, ignore_eos=True))
    parts = request.response()
    next(parts), next(parts)
    assert sum(epp.num_in_flight().values()) == 1
    request.cancel()
    eventually(epp.gateway.is_idle)


def test_an_answer_from_the_second_endpoint_counts_there(epp: Picking) -> None:
    request = epp.envoy.ask(asked(stream=True))
    first, second = request.endpoints
    parts = request.response(served=second)
    next(parts)
    assert epp.num_in_flight() == {first: 0, second: 1}
    assert b"".join(parts).endswith(b"data: [DONE]\n\n")
    eventually(epp.gateway.is_idle)
    assert f'penstock_gateway_retries_total{{model="{NAME}"}} 1' in epp.gateway.metrics()


def test_a_subset_hint_limits_the_pick(epp: Picking, two_replicas: list[Replica]) -> None:
    for replica in two_replicas:
        request = epp.envoy.ask(asked(), subset=[endpoint(replica), "10.0.0.1:80"])
        assert request.endpoints == [endpoint(replica)]
        request.cancel()
    refused = epp.envoy.ask(asked(), subset=["10.0.0.1:80"]).forward()
    assert (refused.status, refused.json["error"]["reason"]) == (503, "no_replica")
    assert "retry-after" in refused.headers


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_request"),
        (b'{"model": 3}', 400, "invalid_request"),
        (b'{"model": "nobody", "prompt": "x"}', 404, "model_not_found"),
        (b'{"model": "small", "prompt": "%b"}' % (b"x" * 200_000), 413, "body_too_large"),
    ],
)
def test_what_is_wrong_is_told_as_the_gateway_tells_it(epp: Picking, body: bytes, status: int, code: str) -> None:
    refused = epp.envoy.ask(body).forward()
    assert (refused.status, refused.json["error"]["code"]) == (status, code)
    assert refused.headers["content-type"] == "application/json"
    assert refused.headers["x-llm-d-request-dropped-reason"] == code


def test_without_a_replica_it_is_503_and_says_when_to_come_back(epp: Picking, two_replicas: list[Replica]) -> None:
    for replica in two_replicas:
        epp.gateway.set_in_use(replica, False)
    refused = epp.envoy.ask(asked()).forward()
    assert (refused.status, refused.json["error"]["code"]) == (503, "engine_unavailable")
    assert int(refused.headers["retry-after"]) >= 1


def test_too_much_is_shed_with_429() -> None:
    with serving(num_blocks=64, max_num_seqs=1) as replica, picking(replica) as epp, engines_paused([replica]):
        held = [epp.envoy.ask(asked(max_tokens=100))]
        refused = epp.envoy.ask(asked(max_tokens=100), x_penstock_max_wait="0").forward()
        assert (refused.status, refused.json["error"]["code"]) == (429, "overloaded")
        assert "retry-after" in refused.headers
        held[0].cancel()
        eventually(epp.gateway.is_idle)


def test_a_request_waits_until_there_is_room_for_it() -> None:
    with serving(num_blocks=64, max_num_seqs=1) as replica, picking(replica) as epp:
        first = epp.envoy.ask(asked(max_tokens=100))
        waiting = epp.envoy.open()
        waiting.send_request(json.dumps(asked(max_tokens=100)).encode())
        eventually(lambda: epp.gateway.call(lambda: len(epp.app.queue)) == 1)
        first.cancel()
        waiting.take_destination()
        assert waiting.endpoints == [endpoint(replica)]
        assert waiting.forward().status == 200


def test_who_waits_and_goes_away_leaves_the_queue() -> None:
    with serving(num_blocks=64, max_num_seqs=1) as replica, picking(replica) as epp:
        first = epp.envoy.ask(asked(max_tokens=100))
        waiting = epp.envoy.open()
        waiting.send_request(json.dumps(asked(max_tokens=100)).encode())
        eventually(lambda: epp.gateway.call(lambda: len(epp.app.queue)) == 1)
        waiting.cancel()
        eventually(lambda: epp.gateway.call(lambda: len(epp.app.queue)) == 0)
        assert first.forward().status == 200
        eventually(epp.gateway.is_idle)


def test_each_model_has_its_replicas(two_replicas: list[Replica]) -> None:
    one, two = two_replicas
    pools = {
        "first": ModelSettings(replicas=[f"http://{endpoint(one)}"], served_as=NAME),
        "second": ModelSettings(replicas=[f"http://{endpoint(two)}"], served_as=NAME, aliases=["other"]),
    }
    with picking(pools=pools) as epp:
        for model, replica in (("first", one), ("second", two), ("other", two)):
            for mode in (DUPLEX, BUFFERED):
                request = epp.envoy.ask(asked(model=model), mode=mode)
                assert request.endpoints == [endpoint(replica)]
                assert json.loads(request.body)["model"] == NAME  # as the replica calls it
                assert request.headers["content-length"] == str(len(request.body))
                assert request.forward().status == 200
        request = epp.envoy.ask(asked(model="nobody"), x_gateway_model_name_rewrite="second")
        assert request.endpoints == [endpoint(two)]
        assert request.forward().status == 200
        eventually(epp.gateway.is_idle)


@pytest.mark.parametrize(("method", "path", "mode"), [("GET", "/v1/models", DUPLEX), ("POST", "/v1/completions", NONE)])
def test_without_a_body_any_replica_is_picked(epp: Picking, method: str, path: str, mode: int) -> None:
    request = epp.envoy.open(method, path, mode)
    request.ask(b"")
    assert len(request.endpoints) == 2
    if method == "GET":
        assert [one["id"] for one in request.forward().json["data"]] == [NAME]


def test_a_path_that_is_not_known_goes_by_its_model(epp: Picking) -> None:
    request = epp.envoy.ask(asked(), path="/v1/responses?x=1")
    assert len(request.endpoints) == 2
    assert sum(epp.num_in_flight().values()) == 1
    request.cancel()


def test_fairness_id_and_objective_stand_for_tenant_and_class(epp: Picking) -> None:
    settings = replace(SETTINGS, objectives={"nightly": "batch"})
    epp.app.picking = settings
    for objective, priority in (("nightly", "LOW"), ("interactive", "HIGH"), ("whatever", "NORMAL")):
        request = epp.envoy.ask(
            asked(), x_gateway_inference_fairness_id="team-a", x_gateway_inference_objective=objective
        )
        (found,) = epp.requests()
        assert (found.tenant, found.priority.name) == ("team-a", priority)
        request.cancel()
        eventually(epp.gateway.is_idle)


def test_a_replica_with_a_secret_is_told_it_and_a_clients_own_words_are_taken_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REPLICA_SECRET", "hidden")
    with serving(ServerSettings(gateway_secret="hidden")) as replica:
        pools = {NAME: ModelSettings(replicas=[f"http://{endpoint(replica)}"], secret_env="REPLICA_SECRET")}
        with picking(pools=pools) as epp:
            request = epp.envoy.ask(asked(), x_penstock="envelope", x_penstock_watermark="mine")
            assert request.headers[SECRET_HEADER] == "hidden"
            assert TENANT_HEADER in request.headers
            assert not {"x-penstock", "x-penstock-watermark"} & request.headers.keys()
            assert request.forward().status == 200


def test_health_is_told_by_service(epp: Picking, two_replicas: list[Replica]) -> None:
    for service in ("", "liveness", "readiness", EXT_PROC):
        assert epp.health(service) == epp.health(service, port=epp.server.health_port) == 1
    with pytest.raises(grpc.RpcError) as raised:
        epp.health("nobody")
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    for replica in two_replicas:
        epp.gateway.set_in_use(replica, False)
    assert [epp.health(service) for service in ("liveness", "readiness", EXT_PROC)] == [1, 2, 2]


def test_tls_with_a_certificate_that_signs_itself(two_replicas: list[Replica]) -> None:
    with picking(*two_replicas, settings=replace(SETTINGS, secure=True)) as epp:
        cert = ssl.get_server_certificate(("127.0.0.1", epp.server.port)).encode()
        with contextlib.closing(FakeEnvoy(epp.server.port, cert, name="penstock-epp")) as envoy:
            assert envoy.ask(asked()).forward().status == 200
        assert epp.health("readiness", port=epp.server.health_port) == 1  # without TLS, for probes


def test_a_new_certificate_is_used_from_the_next_connection_on(two_replicas: list[Replica], tmp_path: Path) -> None:
    ca = new_ca(tmp_path)
    own = ca.issue("epp")
    settings = replace(SETTINGS, secure=True, tls_cert=str(own.cert), tls_key=str(own.key))

    def is_served() -> bool:
        with contextlib.closing(FakeEnvoy(epp.server.port, ca.cert.read_bytes(), name="localhost")) as envoy:
            return envoy.ask(asked()).forward().status == 200

    with picking(*two_replicas, settings=settings) as epp:
        assert is_served()
        first = ssl.get_server_certificate(("127.0.0.1", epp.server.port))
        ca.issue("epp")
        assert ssl.get_server_certificate(("127.0.0.1", epp.server.port)) != first
        assert is_served()
