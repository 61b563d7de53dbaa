"""Every way to ask wrongly: the status and error that the official client expects, and a server that goes on."""

import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from penstock.core.settings import ServerSettings
from tests.server.replica import NAME, Replica, serving
from tests.waiting import eventually

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def the_engine_goes_on(replica: Replica) -> Iterator[None]:
    yield
    assert replica.engine.restarts == 0
    assert replica.openai.completions.create(model=NAME, prompt="still there?", temperature=0).choices[0].text
    assert replica.is_idle()


def test_an_unknown_model_is_not_found(replica: Replica) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        replica.openai.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert refused.value.code == "model_not_found"
    assert refused.value.param == "model"
    assert NAME in refused.value.message


def test_a_prompt_longer_than_the_context_is_refused(replica: Replica) -> None:
    long: Any = [{"role": "user", "content": "word " * replica.model.max_model_len}]
    with pytest.raises(openai.BadRequestError) as refused:
        replica.openai.chat.completions.create(model=NAME, messages=long)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError) as refused:
        replica.openai.completions.create(model=NAME, prompt=[5] * replica.model.max_model_len)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")


def test_a_long_prompt_is_cut_where_the_client_asks_for_it(replica: Replica) -> None:
    token_ids = [token_id % 400 + 10 for token_id in range(replica.model.max_model_len)]
    cut = replica.openai.completions.create(
        model=NAME, prompt=token_ids, temperature=0, extra_body={"truncate_prompt_tokens": 8}
    )
    assert cut.usage is not None
    assert cut.usage.prompt_tokens == 8
    whole = replica.openai.completions.create(model=NAME, prompt=token_ids[-8:], temperature=0)
    assert cut.choices[0].text == whole.choices[0].text


def test_an_output_limit_beyond_the_context_is_refused(replica: Replica) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        replica.openai.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=1_000_000)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "max_tokens")


def test_more_choices_than_the_server_ever_runs_are_refused_for_good(replica: Replica) -> None:
    with pytest.raises(openai.BadRequestError):
        replica.openai.completions.create(model=NAME, prompt=["x"] * 600)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [str(i) for i in range(100)]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"logit_bias": {"word": 1}}, "logit_bias"),
        ({"stop_token_ids": [100000]}, "stop_token_ids"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_a_bad_parameter_is_named(replica: Replica, body: dict[str, object], param: str) -> None:
    status, headers, answer = replica.post(CHAT, **{"messages": MESSAGES} | body)
    assert status == 400
    assert answer["error"]["param"] == param
    assert answer["error"]["type"] == "invalid_request_error"
    assert headers["x-request-id"]


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [{"type": "custom", "custom": {"name": "f"}}]},
        {"structured_outputs": {"structural_tag": "{}"}},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
    ],
)
def test_what_is_not_built_is_refused_and_never_ignored(replica: Replica, body: dict[str, object]) -> None:
    status, _, answer = replica.post(CHAT, **{"messages": MESSAGES} | body)
    assert (status, answer["error"]["code"]) == (400, "unsupported_parameter")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'{"model": "small"', b"\xff\xfe", b'{"model":"small","messages":NaN}', b"[" * 100_000],
)
def test_what_is_no_json_object_is_refused(replica: Replica, body: bytes) -> None:
    status, _, answer = replica.call("POST", CHAT, body)
    assert (status, answer["error"]["code"]) == (400, "invalid_request")


def test_nan_is_no_temperature(replica: Replica) -> None:
    status, _, answer = replica.post(CHAT, messages=MESSAGES, temperature=float("nan"))
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


def test_a_prompt_token_that_does_not_exist_is_refused(replica: Replica) -> None:
    status, _, answer = replica.post(COMPLETIONS, prompt=[1, 100_000])
    assert (status, answer["error"]["param"]) == (400, "prompt")


def test_a_body_of_ten_megabytes_is_too_large(replica: Replica) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        replica.openai.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "x" * 10 * 2**20}])
    assert (refused.value.status_code, refused.value.code) == (413, "body_too_large")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/nothing", 404),
        ("GET", "/", 404),
        ("POST", "/v1/chat/completions/", 404),
    ],
)
def test_a_wrong_method_or_path_has_an_error_of_the_same_shape(
    replica: Replica, method: str, path: str, status: int
) -> None:
    found, headers, answer = replica.call(method, path)
    assert found == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert ("allow" in headers) == (status == 405)


def test_the_clients_request_id_comes_back(replica: Replica) -> None:
    _, headers, _ = replica.call("GET", "/v1/models", **{"X-Request-Id": "mine-1"})
    assert headers["x-request-id"] == "mine-1"


def test_a_request_id_used_twice_at_once_is_two_requests(slow_replica: Replica) -> None:
    body = {"model": NAME, "prompt": "twin", "max_tokens": 10, "temperature": 0}
    answers: list[str] = []

    def ask() -> None:
        _, _, answer = slow_replica.call("POST", COMPLETIONS, body, **{"X-Request-Id": "same"})
        answers.append(answer["choices"][0]["text"])

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [slow_replica.answer("twin", 10)] * 2


def test_beyond_what_may_be_open_requests_are_told_to_come_back() -> None:
    with serving(ServerSettings(max_open=4), step_s=0.01) as replica:
        running = replica.openai.completions.create(
            model=NAME, prompt="x", n=3, stream=True, max_tokens=1000, extra_body={"ignore_eos": True}
        )
        next(iter(running))
        with pytest.raises(openai.RateLimitError) as refused:
            replica.openai.completions.create(model=NAME, prompt="x", n=2)
        assert refused.value.code == "overloaded"
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert replica.openai.completions.create(model=NAME, prompt="x", max_tokens=1).choices
        running.close()
        eventually(replica.is_idle)
        assert replica.openai.completions.create(model=NAME, prompt="x", n=4, max_tokens=1).choices


def test_a_single_replica_has_no_files_and_no_batches(replica: Replica) -> None:
    for refused in (replica.openai.files.list, replica.openai.batches.list, lambda: replica.openai.files.delete("x")):
        with pytest.raises(openai.NotFoundError, match="kept by a gateway") as error:
            refused()
        assert error.value.code == "not_found"
