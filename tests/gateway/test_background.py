"""A gateway whose work beside requests has died says so."""

from __future__ import annotations

import http.client
import json

from penstock.admission.admission import Admission
from penstock.gateway.app import Gateway
from penstock.gateway.monitor.state import state_of
from penstock.gateway.records.recorder import GatewayRecorder
from penstock.observe.background import Worker, outliving
from tests.gateway.running import running_gateway
from tests.server.replica import serving


def test_a_gateway_is_not_ready_when_a_thread_of_its_own_is_dead_and_says_which() -> None:
    with serving() as replica, running_gateway(replica) as gateway:

        def ready() -> tuple[int, object]:
            connection = http.client.HTTPConnection("127.0.0.1", gateway.port)
            connection.request("GET", "/ready")
            answer = connection.getresponse()
            found = answer.status, json.loads(answer.read())
            connection.close()
            return found

        assert ready() == (200, {"ready": True})
        worker = Worker("usage ledger", lambda: False)
        status, said = ready()
        assert status == 503
        assert said == {"ready": False, "reason": "no longer running: usage ledger; start the gateway again"}
        metrics = gateway.call(lambda: _metrics(gateway.app))
        assert b'penstock_gateway_background_dead{work="usage ledger"} 1' in metrics
        worker.stop()
        assert ready()[0] == 200


def test_errors_of_background_work_and_lost_usage_are_metrics() -> None:
    with outliving("a test's work"):
        raise ValueError
    recorder = GatewayRecorder()
    recorder.usage_lost = lambda: {"set_aside": 3}
    recorder.look(state_of([], {}, Admission(), 0.0))
    metrics = recorder.render()
    assert b'penstock_gateway_background_errors_total{work="a test\'s work"} 1' in metrics
    assert b'penstock_gateway_usage_lost_total{reason="set_aside"} 3' in metrics


def _metrics(gateway: Gateway) -> bytes:
    gateway.recorder.look(state_of(gateway.replicas.values(), gateway.pools, gateway.admission, gateway.now()))
    return gateway.recorder.render()
