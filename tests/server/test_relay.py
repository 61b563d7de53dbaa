"""A stream that is cut anywhere and carried on by another replica is the stream that nobody cut, byte for byte."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from penstock.api import relay, server_timing
from penstock.api.relay import StreamRecord
from tests.examples import examples
from tests.server.relaying import ask, block_ends, by_choice, carry_on, events
from tests.server.replica import NAME, Replica, serving
from tests.waiting import eventually

USAGE = re.compile(rb'"usage":\{([^{}]|\{[^{}]*\})*\}')
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES = "/v1/responses"


@pytest.fixture(scope="module")
def other() -> Iterator[Replica]:
    with serving() as found:
        yield found


def address(replica: Replica) -> tuple[str, int]:
    return replica.host, replica.port


def encoded(**body: object) -> bytes:
    return json.dumps({"model": NAME, "stream": True, **body}).encode()


def text_of(stream: bytes) -> str:
    chunks = [json.loads(event[6:]) for event in events(stream) if event != b"data: [DONE]"]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Anything that changes what is sent when; words of the corpus give tokens that are parts of characters too."""
    path = draw(st.sampled_from([CHAT, COMPLETIONS, MESSAGES, RESPONSES]))
    words = draw(st.text("abcé日🙂 ", min_size=1, max_size=20))
    body: dict[str, Any] = {"max_tokens": draw(st.integers(1, 24))}
    body["temperature"] = draw(st.sampled_from([0, 1]))
    if path == RESPONSES:
        body |= {"input": words, "max_output_tokens": body.pop("max_tokens")}
    elif path == COMPLETIONS:
        body["prompt"] = draw(st.sampled_from([words, [words, words + "!"]]))
    else:
        body["messages"] = [{"role": "user", "content": words}]
    # The fake model's words are arbitrary, so short stops of frequent characters hit, or nearly, often enough.
    stops = draw(st.lists(st.text("eta né", min_size=1, max_size=3).filter(str.strip), max_size=3))
    if path == MESSAGES:
        body["stop_sequences"] = stops
        return path, body
    body["stop"] = stops
    if path == RESPONSES:
        return path, body
    body["n"] = draw(st.integers(1, 3))
    body["stop_token_ids"] = draw(st.lists(st.integers(3, 200), max_size=20, unique=True))
    body["min_tokens"] = draw(st.integers(0, body["max_tokens"]))
    body["include_stop_str_in_output"] = draw(st.booleans())
    body["stream_options"] = {"include_usage": draw(st.booleans())}
    if draw(st.booleans()):
        body["seed"] = draw(st.integers(-5, 5))
    match draw(st.sampled_from(["plain", "logprobs", "echo"])):
        case "logprobs":
            body["logprobs"] = 2 if path == COMPLETIONS else True
        case "echo" if path == COMPLETIONS:
            body["echo"] = True
    return path, body


def first_choices(asked: dict[str, Any]) -> range:
    """Of each prompt."""
    n, prompts = asked.get("n", 1), asked.get("prompt")
    return range(0, n * (len(prompts) if isinstance(prompts, list) else 1), n)


@settings(max_examples=examples(70), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(request=requests(), cuts=st.lists(st.floats(0, 0.999), min_size=1, max_size=3))
def test_a_stream_cut_anywhere_and_carried_on_is_the_stream_that_nobody_cut(
    replica: Replica, other: Replica, request: tuple[str, dict[str, Any]], cuts: list[float]
) -> None:
    path, asked = request
    body = encoded(**asked)
    whole = ask(address(replica), path, body)
    forwarded, rest, record = b"", whole, StreamRecord()
    begins_anew = False
    for times, cut in enumerate(cuts):
        ends = block_ends(rest)
        end = ends[int(cut * len(ends))]
        forwarded += rest[:end]
        record.append(rest[:end])
        known = {unit[0] for unit in json.loads(record.envelope(body) or b"")["resume"]["units"]}
        begins_anew |= not known.issuperset(first_choices(asked))
        rest = carry_on(record, address([other, replica][times % 2]), path, body)
        if not block_ends(rest):
            break
    found, wanted = forwarded + rest, whole
    if begins_anew:  # with no token known a prompt counts as cached where it is computed at last
        found, wanted = (USAGE.sub(b'"usage":0', stream) for stream in (found, wanted))
    assert by_choice(found) == by_choice(wanted)


def test_every_cut_of_a_stream_with_stops_and_split_characters(replica: Replica, other: Replica) -> None:
    answer = replica.answer("every cut", 60)
    stop = answer[30:36]
    body = encoded(
        prompt="every cut",
        max_tokens=60,
        temperature=0,
        stop=[answer[12:14] + "~", stop],
        logprobs=1,
        stream_options={"include_usage": True},
    )
    whole = ask(address(replica), COMPLETIONS, body)
    assert text_of(whole) == answer[: answer.index(stop)]
    for end in block_ends(whole)[2:]:  # from its first event on
        record = StreamRecord()
        record.append(whole[:end])
        rest = carry_on(record, address(other), COMPLETIONS, body)
        assert events(whole[:end] + rest) == events(whole)


def test_a_relayed_stream_reads_like_any_other(replica: Replica) -> None:
    body = encoded(prompt="as ever", max_tokens=12, temperature=0, seed=3)
    relayed, plain = (ask(address(replica), COMPLETIONS, body, mode) for mode in ("stream", None))
    assert text_of(relayed) == text_of(plain)
    assert b"\n:" not in plain
    chunks = replica.openai.completions.create(
        model=NAME, prompt="as ever", max_tokens=12, temperature=0, stream=True, extra_headers={"x-penstock": "stream"}
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == text_of(plain)


def test_a_resumed_prompt_costs_only_what_the_cache_does_not_have(replica: Replica) -> None:
    body = encoded(prompt="the long way round " * 20, max_tokens=40, temperature=0)
    whole = ask(address(replica), COMPLETIONS, body)
    record = StreamRecord()
    record.append(whole[: block_ends(whole)[60]])
    before = replica.engine.measured.cache
    carry_on(record, address(replica), COMPLETIONS, body)
    after = replica.engine.measured.cache
    computed = (after.prompt_tokens - before.prompt_tokens) - (after.cached_tokens - before.cached_tokens)
    assert computed <= 4, "one block at most"


def test_a_resumed_stream_goes_before_requests_that_came_earlier() -> None:
    """The engine's own count of steps tells: the new prompt alone fills two, and begins after the resumed one's."""
    new, resumed = (encoded(prompt=f"{name} " * 90, max_tokens=8, temperature=0) for name in ("new", "resumed"))
    with serving(virtual_step_s=0.1) as first, serving(virtual_step_s=0.1) as second, ThreadPoolExecutor(2) as clients:
        whole = ask(address(first), COMPLETIONS, resumed)
        record = StreamRecord()
        record.append(whole[: block_ends(whole)[6]])
        envelope = record.envelope(resumed)
        assert envelope is not None
        with second.engine_paused():
            calls = []
            for number, (body, mode) in enumerate([(new, relay.STREAM), (envelope, relay.ENVELOPE)], 1):
                calls.append(clients.submit(second.call, "POST", COMPLETIONS, body, **{relay.HEADER: mode}))
                eventually(lambda number=number: second.engine.num_open == number)
            second.call("GET", "/health")  # the turn of the event loop that sent them to the engine is over
        timings = [server_timing.decode(call.result()[1]["server-timing"].encode()) for call in calls]
    queued = [round(10 * timing["queue"]) for timing in timings]
    assert queued[1] == 0
    assert queued[0] > 0


def test_tokens_of_an_unfinished_stream_can_be_counted(replica: Replica) -> None:
    whole = ask(address(replica), COMPLETIONS, encoded(prompt="count me", max_tokens=50, n=2, ignore_eos=True))
    record = StreamRecord()
    for start, end in zip([0, *block_ends(whole)], block_ends(whole), strict=False):
        record.append(whole[start:end])
    assert record.num_tokens == 100
    assert not record.is_given_back


def test_a_gateway_may_send_the_prompt_as_ids(replica: Replica) -> None:
    messages = [{"role": "user", "content": "in numbers"}]
    ids = replica.prompt_ids(messages)
    for path, request, prompts in [
        (CHAT, {"messages": [{"role": "user", "content": "not this"}]}, [ids]),
        (COMPLETIONS, {"prompt": ["not", "this"]}, [ids, ids]),
    ]:
        body = {"request": {"model": NAME, "max_tokens": 9, "temperature": 0, **request}, "prompt_ids": prompts}
        status, _, answer = replica.call("POST", path, body, **{"x-penstock": "envelope"})
        assert status == 200
        texts = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in answer["choices"]]
        assert texts == [replica.answer(messages, 9)] * len(prompts)


ORIGIN = {"id": "ab", "created": 1, "seed": 2}
REQUEST = {"model": NAME, "prompt": "x", "max_tokens": 4, "stream": True}


@pytest.mark.parametrize(
    "envelope",
    [
        b"{}",
        b"not JSON",
        {"request": REQUEST, "prompt_ids": []},
        {"request": REQUEST, "prompt_ids": [[]]},
        {"request": REQUEST, "prompt_ids": [[1], [2]]},
        {"request": REQUEST, "prompt_ids": [[100_000]]},
        {"request": REQUEST, "more": 1},
        {"request": REQUEST, "resume": {"units": []}},
        {"request": REQUEST, "resume": {"origin": ORIGIN | {"id": 'x"\n'}}},
        {"request": REQUEST, "resume": {"origin": ORIGIN, "units": [[0, [5]]], "num_events": 0}},
        {"request": REQUEST, "resume": {"origin": ORIGIN, "units": [[0, [100_000]]], "num_events": 1}},
        {"request": REQUEST, "resume": {"origin": ORIGIN, "units": [[1, [5]]], "num_events": 1}},
        {"request": REQUEST | {"stream": False}, "resume": {"origin": ORIGIN}},
        {"request": "x"},
    ],
)
def test_an_envelope_that_makes_no_sense_is_refused(replica: Replica, envelope: object) -> None:
    status, _, answer = replica.call("POST", COMPLETIONS, envelope, **{"x-penstock": "envelope"})
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert replica.engine.restarts == 0
