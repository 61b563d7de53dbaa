"""While the model loads: health answers, the model's routes refuse, and nothing hangs."""

import asyncio
import http.client
import json
import socket

from penstock.core.clock import MonotonicClock
from penstock.core.settings import ServerSettings
from penstock.core.slo import Slo
from penstock.engine.client import EngineClient, EngineState
from penstock.server.app import Replica
from penstock.server.recorder import Recorder
from tests.api.serving import running
from tests.waiting import GIVE_UP_S


async def never(theirs: socket.socket) -> asyncio.subprocess.Process:
    raise AssertionError("the engine is not started in these tests")


def ask(host: str, port: int, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(host, port, timeout=GIVE_UP_S)
    connection.request(method, path, body=b"{}")
    response = connection.getresponse()
    return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()


def test_a_server_whose_model_is_loading_is_alive_but_not_ready() -> None:
    clock = MonotonicClock()
    engine = EngineClient(never, clock)
    app = Replica(engine, Recorder(clock, "m", Slo()), clock, ServerSettings())
    with running(app) as (host, port):
        assert ask(host, port, "GET", "/health")[0] == 200
        status, _, body = ask(host, port, "GET", "/ready")
        assert (status, json.loads(body)["engine"]) == (503, "starting")
        assert ask(host, port, "GET", "/health/deep")[0] == 503
        assert b"penstock_engine_ready 0.0" in ask(host, port, "GET", "/metrics")[2]
        for method, path in (("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("GET", "/v1/models")):
            status, headers, body = ask(host, port, method, path)
            assert (status, json.loads(body)["error"]["code"]) == (503, "engine_unavailable")
            assert int(headers["retry-after"]) >= 1
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            status, _, body = ask(host, port, "POST", path)
            assert (status, json.loads(body)["type"]) == (503, "error")
        assert ask(host, port, "GET", "/nowhere")[0] == 404


def test_a_server_whose_engine_is_ready_and_whose_model_is_not_open_is_not_ready() -> None:
    """Its adapters are being loaded: every route of the model would refuse."""
    clock = MonotonicClock()
    engine = EngineClient(never, clock)
    engine.state = EngineState.READY
    app = Replica(engine, Recorder(clock, "m", Slo()), clock, ServerSettings())
    with running(app) as (host, port):
        status, _, body = ask(host, port, "GET", "/ready")
        assert (status, json.loads(body)["engine"]) == (503, "starting")
        assert json.loads(ask(host, port, "GET", "/v1/penstock/snapshot")[2])["state"] == "starting"
        assert b"penstock_engine_ready 0.0" in ask(host, port, "GET", "/metrics")[2]
