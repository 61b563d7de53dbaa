"""The engine dies, or the client goes away, or the server stops, while a request runs."""

import http.client
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from penstock.core.settings import ServerSettings
from penstock.engine.client import EngineState
from tests.engine.expecting import expected, no_pause
from tests.server.replica import NAME, Replica, serving
from tests.waiting import GIVE_UP_S, eventually

ENDLESS: Any = {"model": NAME, "prompt": "on and on", "max_tokens": 1500, "extra_body": {"ignore_eos": True}}


def health(replica: Replica) -> dict[str, int]:
    return {path: replica.call("GET", path)[0] for path in ("/health", "/ready", "/health/deep")}


def test_when_the_engine_dies_running_streams_are_told_and_the_server_recovers() -> None:
    may_return = threading.Event()
    with serving(step_s=0.01, may_return=may_return, sleep=no_pause) as replica:
        assert health(replica) == {"/health": 200, "/ready": 200, "/health/deep": 200}
        stream = iter(replica.openai.completions.create(stream=True, **ENDLESS))
        next(stream)
        failures: list[Exception] = []

        def ask() -> None:
            try:
                replica.openai.completions.create(**ENDLESS)
            except openai.OpenAIError as error:
                failures.append(error)

        unstreamed = threading.Thread(target=ask)
        unstreamed.start()
        eventually(lambda: replica.engine.measured.load.num_running, lambda number: number == 2)

        replica.kill_engine()
        with pytest.raises(openai.APIError) as failed:
            list(stream)
        unstreamed.join()  # nobody waits for the engine's return
        assert failed.value.code == "engine_failed"
        assert isinstance(failures[0], openai.InternalServerError)
        assert failures[0].status_code == 500

        assert health(replica) == {"/health": 200, "/ready": 503, "/health/deep": 503}
        with pytest.raises(openai.InternalServerError) as refused:
            replica.openai.completions.create(model=NAME, prompt="now?")
        assert (refused.value.status_code, refused.value.code) == (503, "engine_unavailable")
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert replica.metrics()["penstock_engine_ready"] == 0
        assert replica.metrics()["penstock_sequences_running"] == 0
        assert replica.metrics()["penstock_kv_usage_ratio"] == 0

        may_return.set()
        eventually(lambda: replica.call("GET", "/ready")[0], lambda status: status == 200)
        text = replica.openai.completions.create(model=NAME, prompt="again", temperature=0).choices[0].text
        assert text == replica.answer("again", 16)
        metrics = replica.final_metrics()
        assert metrics["penstock_engine_ready"] == 1
        assert metrics["penstock_engine_restarts_total"] == 1
        assert metrics["penstock_requests_total{engine_failed,completions,500}"] == 2
        assert metrics["penstock_requests_total{engine_unavailable,completions,503}"] == 1


def test_an_engine_that_cannot_start_is_neither_live_nor_ready() -> None:
    with serving(start="failed") as replica:
        assert replica.engine.state is EngineState.FAILED
        assert health(replica) == {"/health": 503, "/ready": 503, "/health/deep": 503}
        assert replica.metrics()["penstock_engine_ready"] == 0


def test_deep_health_fails_when_no_token_comes_in_time() -> None:
    with serving(ServerSettings(deep_health_timeout_s=0.05)) as replica:
        with replica.engine_paused():
            status, _, answer = replica.call("GET", "/health/deep")
            assert (status, answer["reason"]) == (503, "no token in time")
            assert replica.call("GET", "/ready")[0] == 200
        eventually(replica.is_idle)


def test_those_who_ask_for_deep_health_at_once_share_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as replica:
        arrived: list[object] = []
        monkeypatch.setattr(replica.app.trust, "check", arrived.append)
        with ThreadPoolExecutor(8) as pool:
            with replica.engine_paused():
                asked = [pool.submit(replica.call, "GET", "/health/deep") for _ in range(8)]
                eventually(lambda: len(arrived), lambda number: number == 8)
                assert replica.call("GET", "/ready")[0] == 200  # so each of them has had its turn
                assert replica.engine.num_open == 1
            answers = [one.result(GIVE_UP_S) for one in asked]
        assert {(status, answer["latency_s"]) for status, _, answer in answers} == {(200, answers[0][2]["latency_s"])}
        assert replica.call("GET", "/health/deep")[0] == 200  # a new one


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_work(slow_replica: Replica, stream: bool) -> None:
    before = slow_replica.metrics().get("penstock_requests_total{request_aborted,completions,503}", 0)
    body = {"model": NAME, "prompt": "on and on", "max_tokens": 1500, "ignore_eos": True, "n": 3, "stream": stream}
    connection = http.client.HTTPConnection(slow_replica.host, slow_replica.port)
    connection.request("POST", "/v1/completions", json.dumps(body))
    if stream:
        connection.getresponse().readline()
    eventually(lambda: slow_replica.engine.measured.load.num_running, lambda number: number == 3)
    steps = slow_replica.engine.measured.load.steps
    with slow_replica.engine_paused():
        assert connection.sock is not None
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
        eventually(lambda: slow_replica.engine.num_open, lambda number: number == 0)
    eventually(slow_replica.is_idle)
    assert slow_replica.engine.measured.load.steps - steps < 1500, "it was not run to its end"
    assert slow_replica.final_metrics()["penstock_requests_total{request_aborted,completions,503}"] == before + 1


def test_a_client_that_reads_slowly_gets_everything(replica: Replica) -> None:
    body = {"model": NAME, "prompt": "slowly", "max_tokens": 1500, "ignore_eos": True, "stream": True, "temperature": 0}
    connection = http.client.HTTPConnection(replica.host, replica.port)
    connection.connect()
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
    connection.request("POST", "/v1/completions", json.dumps(body))
    response = connection.getresponse()
    eventually(replica.is_idle)  # all of it was generated, and nobody has read it
    events = [line.removeprefix(b"data: ") for line in response.read().splitlines() if line]
    connection.close()
    assert events.pop() == b"[DONE]"
    whole = expected(replica.prompt_ids("slowly"), 1500, vocab_size=replica.model.tokenizer.vocab_size)
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
    assert text == replica.model.tokenizer.decode(whole)


def test_a_server_that_stops_lets_running_streams_finish() -> None:
    texts: list[str] = []
    with serving(step_s=0.01) as replica:
        wanted = replica.answer("to the end", 60)
        stream = replica.openai.completions.create(
            model=NAME, prompt="to the end", max_tokens=60, temperature=0, stream=True
        )
        texts.append(next(iter(stream)).choices[0].text)
        reader = threading.Thread(target=lambda: texts.extend(chunk.choices[0].text for chunk in stream))
        reader.start()
    reader.join()
    assert "".join(texts) == wanted
