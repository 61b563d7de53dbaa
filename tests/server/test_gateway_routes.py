"""What only a gateway may ask, and what becomes of streams when a replica drains or its engine dies."""

import http.client
import json
import threading

import pytest

from penstock.api import relay
from penstock.api import tokenizer_bundle as model_text
from penstock.api.relay import StreamRecord
from penstock.core.settings import ServerSettings
from penstock.text.tokenizer import Tokenizer
from tests.engine.expecting import no_pause
from tests.server.relaying import ask, asking, block_ends, carry_on, events
from tests.server.replica import NAME, Replica, serving
from tests.waiting import GIVE_UP_S, eventually

SNAPSHOT, DRAIN, COMPLETIONS = "/v1/penstock/snapshot", "/v1/penstock/drain", "/v1/completions"
GIVE_BACK = "/v1/penstock/give_back"


def body(**more: object) -> bytes:
    wanted = {"model": NAME, "prompt": "on and on", "stream": True, "temperature": 0, "ignore_eos": True, **more}
    return json.dumps(wanted).encode()


def snapshot(replica: Replica) -> dict[str, object]:
    status, _, found = replica.call("GET", SNAPSHOT)
    assert status == 200
    return dict(found)


# -- what it says of itself


def test_a_snapshot_tells_load_limits_and_speed(slow_replica: Replica) -> None:
    idle = snapshot(slow_replica)
    assert (idle["model"], idle["state"], idle["is_draining"]) == (NAME, "ready", False)
    assert (idle["num_running"], idle["kv_active_tokens"], idle["kv_capacity_tokens"]) == (0, 0, 2048)
    assert (idle["max_num_seqs"], idle["chunk_tokens"], idle["max_model_len"], idle["block_size"]) == (64, 64, 2048, 4)
    with asking((slow_replica.host, slow_replica.port), COMPLETIONS, body(max_tokens=1500, n=2)) as response:
        response.readline()
        busy = eventually(lambda: snapshot(slow_replica), lambda found: found["num_running"] == 2)
        assert (busy["num_open"], busy["queued_tokens"]) == (2, 0)
        assert busy["kv_active_tokens"] > 0  # type: ignore[operator]
        eventually(lambda: snapshot(slow_replica), lambda found: found["steps"] > busy["steps"])  # type: ignore[operator]
        eventually(lambda: snapshot(slow_replica), lambda found: found["decode_step_s"] is not None)
    eventually(slow_replica.is_idle)
    speed, known = snapshot(slow_replica), slow_replica.engine.speed
    assert (speed["decode_step_s"], speed["prefill_tokens_per_s"]) == (known.decode_step_s, known.prefill_tokens_per_s)
    assert speed["decode_step_s"] >= 0.01  # type: ignore[operator]
    assert speed["boot"] == idle["boot"]


def test_the_tokenizer_and_the_template_are_handed_over_under_their_digest(slow_replica: Replica) -> None:
    eventually(lambda: snapshot(slow_replica)["text"])
    status, headers, found = slow_replica.call("GET", model_text.PATH)
    digest = snapshot(slow_replica)["text"]
    assert (status, headers["etag"]) == (200, f'"{digest}"')
    model = slow_replica.model
    same = Tokenizer.from_json(found["tokenizer"], found["special_tokens"])
    text = "größer 日本 🙂 <s> 12345"
    ids = model.tokenizer.encode(text, add_special_tokens=True)
    assert same.encode(text, add_special_tokens=True) == ids
    assert same.count([text, ""], add_special_tokens=True) == [len(ids), 0]
    assert found["chat_template"] == model.chat_template.source
    assert (found["vocab_size"], found["bos_token_id"]) == (model.config.vocab_size, model.config.bos_token_id)


def test_snapshots_are_pushed_when_they_change(slow_replica: Replica) -> None:
    connection = http.client.HTTPConnection(slow_replica.host, slow_replica.port, timeout=GIVE_UP_S)
    connection.request("GET", "/v1/penstock/snapshots")
    response = connection.getresponse()
    pushed = (json.loads(line[6:]) for line in response if line.startswith(b"data: "))
    first = next(pushed)
    assert first["num_running"] == 0
    with asking((slow_replica.host, slow_replica.port), COMPLETIONS, body(max_tokens=1000)) as running:
        running.readline()
        seen = next(one for one in pushed if one["num_running"])
    assert seen["num_running"] == 1
    assert seen["steps"] > first["steps"]
    connection.close()
    eventually(slow_replica.is_idle)


def test_a_role_changes_while_it_runs(slow_replica: Replica) -> None:
    assert snapshot(slow_replica)["role"] == "both"
    try:
        status, _, told = slow_replica.call("POST", "/v1/penstock/role", {"role": "prefill"})
        assert (status, told["role"], snapshot(slow_replica)["role"]) == (200, "prefill", "prefill")
        for wrong in ({"role": "encode"}, {}, {"role": "decode", "more": 1}):
            status, _, answer = slow_replica.call("POST", "/v1/penstock/role", wrong)
            assert (status, answer["error"]["param"]) == (400, "role")
        assert snapshot(slow_replica)["role"] == "prefill"
    finally:
        slow_replica.call("POST", "/v1/penstock/role", {"role": "both"})


# -- who may ask


def test_with_a_secret_only_who_knows_it_is_a_gateway() -> None:
    with serving(ServerSettings(gateway_secret="open sesame")) as replica:
        assert [replica.call("GET", path)[0] for path in ("/health", "/ready")] == [200, 200]
        for offered in ({}, {"x-penstock-secret": "sesame"}, {"x-penstock-secret": "é"}):
            for method, path, mode in [
                ("GET", SNAPSHOT, {}),
                ("GET", "/v1/penstock/snapshots", {}),
                ("POST", DRAIN, {}),
                ("DELETE", DRAIN, {}),
                ("POST", GIVE_BACK, {}),
                ("POST", "/v1/penstock/park", {}),
                ("POST", "/v1/penstock/wake", {}),
                ("POST", "/v1/penstock/role", {}),
                ("GET", "/metrics", {}),
                ("GET", "/health/deep", {}),
                ("GET", "/v1/models", {}),
                ("POST", "/v1/embeddings", {}),
                ("POST", "/v1/load_lora_adapter", {}),
                ("GET", "/nothing", {}),
                ("POST", COMPLETIONS, {}),
                ("POST", COMPLETIONS, {"x-penstock": "stream"}),
                ("POST", COMPLETIONS, {"x-penstock": "envelope"}),
            ]:
                status, _, answer = replica.call(method, path, body() if method == "POST" else None, **mode, **offered)
                assert (status, answer["error"]["code"]) == (403, "permission_denied")
                assert "sesame" not in json.dumps(answer)
            for path in ("/v1/messages", "/v1/messages/count_tokens"):
                status, _, answer = replica.call("POST", path, body(), **offered)
                assert (status, answer["error"]["type"]) == (403, "permission_error")
        known = {"x-penstock-secret": "open sesame"}
        for path in ("/metrics", "/health/deep", "/v1/models"):
            assert replica.call("GET", path, **known)[0] == 200
        assert replica.call("POST", COMPLETIONS, body(stream=False), authorization="Bearer open sesame")[0] == 200
        assert replica.call("GET", SNAPSHOT, **known)[0] == 200
        status, _, stream = replica.call("POST", COMPLETIONS, body(max_tokens=3), **known, **{"x-penstock": "stream"})
        assert status == 200
        assert stream.startswith(b": {")


def test_a_mode_nobody_knows_is_refused(replica: Replica) -> None:
    status, _, answer = replica.call("POST", COMPLETIONS, body(), **{"x-penstock": "teleport"})
    assert (status, answer["error"]["code"]) == (400, "invalid_request")


# -- going away


@pytest.mark.parametrize("end", ["asked", "device", "engine"])
def test_streams_of_a_gateway_are_given_back_and_go_on_elsewhere(end: str, replica: Replica) -> None:
    asked = body(max_tokens=200)
    record = StreamRecord()
    with serving(step_s=0.05, sleep=no_pause) as leaving:
        with asking((leaving.host, leaving.port), COMPLETIONS, asked) as response:
            forwarded = b"".join(response.readline() for _ in range(12))
            if end == "asked":
                record.append(forwarded[: block_ends(forwarded)[-1]])
                status, _, _ = leaving.call("POST", GIVE_BACK, {"ids": ["another", record.stream_id]})
                assert status == 200
                record = StreamRecord()
            elif end == "device":
                leaving.loop.call_soon_threadsafe(leaving.app.drain.begin, "the GPU is broken")
            else:
                leaving.kill_engine()
            forwarded += response.read()
        record.append(forwarded)
        assert record.is_given_back
        assert b"error" not in b"".join(events(forwarded))
        eventually(lambda: leaving.engine.num_open, lambda number: number == 0)
    rest = carry_on(record, (replica.host, replica.port), COMPLETIONS, asked)
    texts = [json.loads(event[6:])["choices"][0]["text"] for event in events(forwarded + rest)[:-1]]
    whole = ask((replica.host, replica.port), COMPLETIONS, asked)
    assert "".join(texts) == "".join(json.loads(event[6:])["choices"][0]["text"] for event in events(whole)[:-1])
    assert len(block_ends(rest)) > 10


@pytest.mark.parametrize("mode", [None, relay.STREAM])
def test_a_draining_replica_takes_nothing_new_and_lets_others_finish(mode: str | None) -> None:
    with serving() as replica:
        texts: list[bytes] = []
        plain = threading.Thread(
            target=lambda: texts.append(ask((replica.host, replica.port), COMPLETIONS, body(max_tokens=60), mode))
        )
        with replica.engine_paused():
            plain.start()
            eventually(lambda: replica.engine.num_open, lambda number: number == 1)
            assert replica.call("POST", DRAIN)[0] == 200
            status, headers, answer = replica.post(COMPLETIONS, prompt="more")
            assert (status, answer["error"]["code"]) == (503, "engine_unavailable")
            assert int(headers["retry-after"]) >= 1
            assert replica.call("GET", "/ready")[0] == 503
            assert replica.call("GET", "/health")[0] == 200
            assert texts == []
        plain.join(GIVE_UP_S)
        assert texts[0].endswith(b"data: [DONE]\n\n")


def test_ids_to_give_back_are_a_list_of_texts(replica: Replica) -> None:
    for wrong in (b"", b"[]", {"ids": 1}, {"ids": [1]}, {"id": "x"}):
        status, _, answer = replica.call("POST", GIVE_BACK, wrong)
        assert (status, answer["error"]["code"]) == (400, "invalid_request")


def test_a_drain_can_be_taken_back_unless_the_device_had_a_fault() -> None:
    with serving() as replica:
        assert replica.call("POST", DRAIN)[0] == 200
        assert replica.post(COMPLETIONS, prompt="x", max_tokens=1)[0] == 503
        status, _, report = replica.call("DELETE", DRAIN)
        assert (status, report["is_draining"]) == (200, False)
        assert replica.post(COMPLETIONS, prompt="x", max_tokens=1)[0] == 200
        assert replica.call("GET", "/ready")[0] == 200
        assert replica.call("POST", DRAIN)[0] == 200
        replica.app.drain.begin("the GPU is broken")  # as its sampling says
        status, _, answer = replica.call("DELETE", DRAIN)
        assert (status, answer["error"]["message"]) == (409, "the GPU is broken")
        assert replica.call("GET", "/ready")[2]["reason"] == "the GPU is broken"


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example", "content-type": "text/plain"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"host": "rebound.example"},
    ],
)
@pytest.mark.parametrize("path", [DRAIN, "/v1/load_lora_adapter", COMPLETIONS, "/v1/messages/count_tokens"])
def test_no_web_page_can_use_a_replica(replica: Replica, path: str, headers: dict[str, str]) -> None:
    assert replica.call("POST", path, body(), **headers)[0] == 403
    assert replica.call("GET", "/ready")[0] == 200
    assert replica.call("GET", "/health", **headers)[0] == 200


def test_a_page_of_the_replicas_own_origin_can_use_it(replica: Replica) -> None:
    own = {"origin": f"http://{replica.host}:{replica.port}", "sec-fetch-site": "same-origin"}
    assert replica.call("POST", COMPLETIONS, body(stream=False), **own)[0] == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
@pytest.mark.parametrize("path", [DRAIN, GIVE_BACK, "/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
def test_what_changes_a_replica_has_to_be_json(replica: Replica, path: str, kind: str) -> None:
    status, _, answer = replica.call("POST", path, b"{}", **{"content-type": kind})
    assert (status, answer["error"]["param"]) == (400, "content-type")
    assert replica.call("GET", "/ready")[0] == 200
