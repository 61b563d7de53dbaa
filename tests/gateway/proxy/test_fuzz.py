"""The door under attack: what no client should send changes nothing, hangs nothing and leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools.drills.fuzz import fuzz

from penstock.core.errors import InvalidRequest
from penstock.gateway.proxy.request_view import read, with_model, with_output_limit
from penstock.gateway.records.token_usage import find_usage
from tests.attacked import bounded
from tests.gateway.running import RunningGateway, running_gateway
from tests.server.replica import NAME, Replica
from tests.waiting import eventually

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.sampled_from(["model", "max_tokens", "n", "prompt", "stream", "x"]), VALUES)


@pytest.fixture(scope="module")
def replica(replica_at_hand: Replica) -> Replica:
    return replica_at_hand


@pytest.fixture(scope="module")
def gateway(replica: Replica) -> Iterator[RunningGateway]:
    with running_gateway(replica) as found:
        yield found


def num_connections(port: int) -> int:
    found = psutil.Process().net_connections("tcp")
    return sum(one.laddr.port == port and one.status == "ESTABLISHED" for one in found)


@pytest.mark.parametrize(
    ("seed", "count"), [(1, 600), pytest.param(2, 5_000, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_what_no_client_should_send_is_refused_and_leaves_nothing_behind(
    gateway: RunningGateway, replica: Replica, caplog: pytest.LogCaptureFixture, seed: int, count: int
) -> None:
    with bounded(gateway.loop):
        found = fuzz("127.0.0.1", gateway.port, NAME, seed=seed, count=count)
    assert found.faults == []
    assert found.statuses[200] > count // 20  # some were harmless
    assert [record for record in caplog.records if record.exc_info] == []
    eventually(gateway.is_idle)
    eventually(replica.is_idle)
    eventually(lambda: num_connections(gateway.port) == 0)
    with gateway.client("none") as client:
        answer = client.completions.create(model=NAME, prompt="the fox", max_tokens=5, temperature=0)
    assert answer.choices[0].text == replica.answer("the fox", 5)


@given(st.binary() | OBJECTS.map(json.dumps).map(str.encode))
def test_any_body_is_read_or_refused(body: bytes) -> None:
    try:
        asked = read(body)
    except InvalidRequest:
        return
    assert asked.num_choices >= 1
    assert read(with_model(body, "other")).model == "other"
    if asked.output_limit is None:
        assert read(with_output_limit(body, 7)).output_limit == 7


@given(st.binary())
def test_any_end_of_an_answer_has_a_usage_or_none(tail: bytes) -> None:
    find_usage(tail)
    find_usage(b'"usage":' + tail)
    assert find_usage(b'"usage":' + b"[" * 100_000 + tail) is None


def test_every_prompt_of_a_completion_counts_as_a_choice() -> None:
    for prompt, num_choices in (('"x"', 2), ('["a","b"]', 4), ("[1,2,3]", 2), ("[[1],[2],[3]]", 6), ("null", 2)):
        assert read(b'{"model":"m","n":2,"prompt":%b}' % prompt.encode()).num_choices == num_choices


def test_a_limit_that_is_null_does_not_undo_the_tenants(gateway: RunningGateway) -> None:
    client = gateway.client(gateway.add_tenant("acme", limits={"max_output": 7}))
    found = client.completions.create(model=NAME, prompt="the fox", extra_body={"max_tokens": None, "ignore_eos": True})
    assert found.usage is not None
    assert found.usage.completion_tokens == 7


def test_a_long_name_of_a_model_is_refused_and_not_repeated(gateway: RunningGateway) -> None:
    client = gateway.client(gateway.add_tenant("names"))
    for length, error in (
        (257, openai.BadRequestError),
        (4 << 20, openai.BadRequestError),
        (256, openai.NotFoundError),
    ):
        with pytest.raises(error) as refused:
            client.completions.create(model="x" * length, prompt="the fox")
        assert refused.value.param == "model"
        assert len(refused.value.message) < 300


def test_a_long_name_of_a_session_is_kept_as_a_hash() -> None:
    long = read(json.dumps({"model": "m", "user": "u" * 100_000}).encode()).session
    assert long is not None
    assert len(long) == 32
    assert read(b'{"model":"m","user":"me"}').session == "me"
