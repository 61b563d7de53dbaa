"""A replica that is parked and woken over HTTP, with a real engine process over the fake runner."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from penstock.api.parking import PARK_PATH, WAKE_PATH
from penstock.core.settings import ServerSettings
from penstock.engine.client import EngineState
from tests.engine.expecting import no_pause
from tests.server.relaying import asking
from tests.server.replica import NAME, Replica, serving
from tests.server.test_gateway_routes import COMPLETIONS, DRAIN, SNAPSHOT, body
from tests.waiting import GIVE_UP_S, eventually

QUESTION = {"prompt": "on and on", "temperature": 0, "max_tokens": 8, "ignore_eos": True}


def text(replica: Replica) -> str:
    status, _, answer = replica.post(COMPLETIONS, **QUESTION)
    assert status == 200, answer
    return str(answer["choices"][0]["text"])


def state(replica: Replica) -> tuple[str, bool]:
    report = replica.call("GET", SNAPSHOT)[2]
    return report["state"], report["is_draining"]


def test_a_replica_is_parked_and_woken_and_answers_as_before() -> None:
    with serving() as replica:
        before = text(replica)
        assert replica.call("GET", SNAPSHOT)[2]["can_park"] is True
        status, _, parked = replica.call("POST", PARK_PATH, {})
        assert (status, parked["state"]) == (200, "parked")
        assert parked["num_bytes"] > 0
        assert parked["seconds"].keys() == {"drain", "release"}
        assert state(replica) == ("parked", True)
        status, _, ready = replica.call("GET", "/ready")
        assert (status, ready["engine"], ready["reason"]) == (503, "parked", "this replica is parked")
        assert replica.call("GET", "/health")[0] == 200
        for path, asked in ((COMPLETIONS, QUESTION), ("/v1/embeddings", {"input": "a text"})):
            status, headers, refused = replica.post(path, **asked)
            assert (status, refused["error"]["message"]) == (503, "this replica is parked")
            assert int(headers["retry-after"]) >= 1
        assert replica.call("POST", PARK_PATH)[2] == {"state": "parked", "seconds": {}, "num_bytes": 0}
        status, _, refused = replica.call("DELETE", DRAIN)
        assert (status, refused["error"]["message"]) == (409, "this replica is parked")
        status, _, woken = replica.call("POST", WAKE_PATH)
        assert (status, woken["state"]) == (200, "ready")
        assert list(woken["seconds"]) == ["map", "first_token"]
        assert state(replica) == ("ready", False)
        assert text(replica) == before
        assert replica.call("POST", WAKE_PATH)[2] == {"state": "ready", "seconds": {}, "num_bytes": 0}
        assert replica.engine.restarts == 0


def test_a_replica_with_open_requests_is_not_parked_and_goes_on() -> None:
    with serving(step_s=0.01) as replica, ThreadPoolExecutor(1) as pool:
        with asking((replica.host, replica.port), COMPLETIONS, body(max_tokens=1500)) as response:
            response.readline()
            status, _, refused = replica.call("POST", PARK_PATH, {"wait_s": 0})
            assert (status, refused["error"]["code"]) == (409, "conflict")
            assert "1 requests or texts are still open after 0 s" in refused["error"]["message"]
            assert state(replica) == ("ready", False)
            assert replica.post(COMPLETIONS, prompt="x", max_tokens=1)[0] == 200
            parking = pool.submit(replica.call, "POST", PARK_PATH, {"wait_s": 600})
            eventually(lambda: state(replica), lambda found: found == ("parking", True))
            assert replica.post(COMPLETIONS, prompt="x", max_tokens=1)[0] == 503
        assert parking.result(GIVE_UP_S)[0] == 200, "its last client has gone"
        assert replica.engine.measured.load.steps < 1500


def test_parks_and_wakes_at_once_come_one_after_the_other() -> None:
    with serving() as replica, ThreadPoolExecutor(8) as pool:
        together = threading.Barrier(8)

        def ask(path: str) -> tuple[int, Any]:
            together.wait(GIVE_UP_S)
            status, _, answer = replica.call("POST", path)
            return status, answer["state"]

        asked = [pool.submit(ask, path) for path in (PARK_PATH, WAKE_PATH) * 4]
        assert {one.result(GIVE_UP_S) for one in asked} == {(200, "parked"), (200, "ready")}
        assert replica.call("POST", WAKE_PATH)[0] == 200
        assert text(replica)
        assert replica.engine.restarts == 0


def test_a_replica_that_drained_before_it_was_parked_drains_after_it_is_woken() -> None:
    with serving() as replica:
        assert replica.call("POST", DRAIN)[0] == 200
        assert replica.call("POST", PARK_PATH)[0] == 200
        assert replica.call("POST", WAKE_PATH)[0] == 200
        assert state(replica) == ("ready", True)
        assert replica.call("DELETE", DRAIN)[0] == 200
        assert text(replica)


@pytest.mark.parametrize("failing", ["memory", "engine"])
def test_a_wake_that_fails_leaves_the_replica_parked_and_can_be_tried_again(failing: str) -> None:
    with serving(sleep=no_pause, wake_fails=1 if failing == "memory" else 0) as replica:
        assert replica.call("POST", PARK_PATH)[0] == 200
        if failing == "memory":
            status, _, refused = replica.call("POST", WAKE_PATH)
            assert (status, refused["error"]["message"]) == (503, "the device has no room")
            assert state(replica) == ("parked", True)
        else:
            replica.kill_engine()
            eventually(lambda: (replica.engine.restarts, replica.engine.state), lambda now: now == (1, "ready"))
            assert state(replica) == ("ready", True)
            assert replica.post(COMPLETIONS, **QUESTION)[0] == 503
        assert replica.call("POST", WAKE_PATH)[0] == 200
        assert text(replica)


def test_what_cannot_be_parked_says_why() -> None:
    with serving(can_park=False) as replica:
        status, _, refused = replica.call("POST", PARK_PATH)
        assert (status, refused["error"]["code"]) == (400, "unsupported_task")
        assert state(replica) == ("ready", False)
        assert text(replica)
        assert replica.engine.state is EngineState.READY
        assert replica.call("GET", SNAPSHOT)[2]["can_park"] is False
        for wrong in (b"[]", {"wait_s": -1}, {"wait": 1}, {"wait_s": 1e9}):
            assert replica.call("POST", PARK_PATH, wrong)[0] == 400
        replica.loop.call_soon_threadsafe(replica.app.drain.begin, "the GPU is broken")
        eventually(lambda: state(replica), lambda found: found[1])
        assert replica.call("POST", PARK_PATH)[2]["error"]["message"] == "the GPU is broken"


def test_only_a_gateway_parks_and_wakes() -> None:
    with serving(ServerSettings(gateway_secret="open sesame")) as replica:
        for path in (PARK_PATH, WAKE_PATH):
            assert replica.call("POST", path)[0] == 403
            assert replica.call("POST", path, b"{}", **{"x-penstock-secret": "sesame"})[0] == 403
            known = {"x-penstock-secret": "open sesame"}
            assert replica.call("POST", path, b"{}", **known, **{"content-type": "text/plain"})[0] == 400
            assert replica.call("POST", path, b"{}", **known)[0] == 200
        assert replica.model.name == NAME
