"""What an application does with Anthropic's official client, checked against what the fake model must say."""

import http.client
import json
import threading
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, TextBlock

from penstock.core.settings import ServerSettings
from tests.engine.expecting import expected, no_pause
from tests.sdk import Unverified
from tests.server.replica import NAME, Replica, serving
from tests.waiting import eventually

MESSAGES = "/v1/messages"
QUESTION: Any = {"role": "user", "content": "What is it?"}
GREEDY: Any = {"model": NAME, "extra_body": {"temperature": 0}}
ENDLESS: Any = {"model": NAME, "messages": [QUESTION], "max_tokens": 1500}


def client(replica: Replica) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=f"http://{replica.host}:{replica.port}", api_key="none", max_retries=0, http_client=Unverified()
    )


def create(replica: Replica, *messages: Any, max_tokens: int = 12, **options: Any) -> Message:
    answer: Message = client(replica).messages.create(messages=messages, max_tokens=max_tokens, **GREEDY | options)
    return answer


def text_of(answer: Message) -> str:
    (block,) = answer.content
    assert isinstance(block, TextBlock)
    return block.text


# -- answers


def test_a_message_is_answered(replica: Replica) -> None:
    answer = create(replica, QUESTION)
    assert answer.id.startswith("msg_")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", NAME)
    assert text_of(answer) == replica.answer([QUESTION], 12)
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    assert answer._request_id


@pytest.mark.parametrize("system", ["Be brief.", [{"type": "text", "text": "Be brief."}]])
def test_the_system_prompt_is_heard(replica: Replica, system: Any) -> None:
    assert text_of(create(replica, QUESTION, system=system)) == replica.answer(
        [{"role": "system", "content": "Be brief."}, QUESTION], 12
    )


def test_a_conversation_goes_on_with_the_answer_as_it_was_received(replica: Replica) -> None:
    with client(replica).messages.stream(messages=[QUESTION], max_tokens=12, **GREEDY) as stream:
        streamed = stream.get_final_message()
    said = {"role": "assistant", "content": replica.answer([QUESTION], 12)}
    for first in (create(replica, QUESTION), streamed):
        second = create(replica, QUESTION, {"role": "assistant", "content": first.content}, QUESTION)
        assert text_of(second) == replica.answer([QUESTION, said, QUESTION], 12)


def test_an_answer_that_was_begun_is_continued(replica: Replica) -> None:
    begun = create(replica, QUESTION, {"role": "assistant", "content": "The answer is ("})
    prompt = replica.model.chat_template.render([QUESTION]) + "The answer is ("
    prompt_ids = replica.model.tokenizer.encode(prompt, add_special_tokens=False)
    said = expected(prompt_ids, 12, vocab_size=replica.model.tokenizer.vocab_size)
    assert text_of(begun) == replica.model.tokenizer.decode(said)
    assert begun.usage.input_tokens + (begun.usage.cache_read_input_tokens or 0) == len(prompt_ids)


def test_an_answer_that_comes_to_its_end_says_so(replica: Replica) -> None:
    answer = create(replica, QUESTION, max_tokens=1500)
    assert text_of(answer) == replica.answer([QUESTION], 1500)
    assert answer.stop_reason == "end_turn"


def test_a_stop_sequence_ends_the_text_and_is_named(replica: Replica) -> None:
    whole = replica.answer([QUESTION], 30)
    stop = whole[9:12]
    answer = create(replica, QUESTION, max_tokens=30, stop_sequences=["never this", stop])
    assert text_of(answer) == whole[: whole.index(stop)]
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)


def test_a_limit_beyond_the_context_is_cut_and_the_answer_says_where_it_ended(replica: Replica) -> None:
    longest = replica.model.max_model_len
    one, two = (len(replica.prompt_ids([{"role": "user", "content": "x" * count}])) for count in (100, 200))
    fitting = 100 + 100 * (longest - 10 - one) // (two - one)
    question: Any = {"role": "user", "content": "x" * fitting}
    usage = (answer := create(replica, question, max_tokens=longest)).usage
    assert answer.stop_reason == "model_context_window_exceeded"
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) + usage.output_tokens == longest
    assert create(replica, question, max_tokens=3).stop_reason == "max_tokens"
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        create(replica, QUESTION, max_tokens=longest + 1)


def test_what_was_read_from_the_cache_is_counted_apart(replica: Replica) -> None:
    question: Any = {"role": "user", "content": "a prompt of several blocks that is asked for again and again"}
    num_prompt_tokens = len(replica.prompt_ids([question]))
    for _ in range(2):
        usage = create(replica, question, max_tokens=2).usage
    assert usage.cache_read_input_tokens is not None
    assert usage.cache_read_input_tokens > 0
    assert usage.input_tokens + usage.cache_read_input_tokens == num_prompt_tokens
    assert usage.output_tokens == 2


# -- streams


def test_a_stream_says_the_same_as_the_whole(replica: Replica) -> None:
    with client(replica).messages.stream(messages=[QUESTION], max_tokens=12, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(final) == replica.answer([QUESTION], 12)
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 12
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) == len(replica.prompt_ids([QUESTION]))
    assert stream.request_id


def test_a_stream_names_the_stop_sequence(replica: Replica) -> None:
    whole = replica.answer([QUESTION], 30)
    stop = whole[9:12]
    with client(replica).messages.stream(messages=[QUESTION], max_tokens=30, stop_sequences=[stop], **GREEDY) as stream:
        final = stream.get_final_message()
    assert text_of(final) == whole[: whole.index(stop)]
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stop)


def test_events_come_in_their_order(replica: Replica) -> None:
    body = {"model": NAME, "max_tokens": 8, "messages": [QUESTION], "stream": True, "temperature": 0}
    _, headers, content = replica.call("POST", MESSAGES, body)
    assert headers["content-type"].startswith("text/event-stream")
    names = [line.removeprefix("event: ") for line in content.decode().splitlines() if line.startswith("event: ")]
    assert names[:3] == ["message_start", "content_block_start", "ping"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]


async def test_the_async_client_streams_too(replica: Replica) -> None:
    base_url = f"http://{replica.host}:{replica.port}"
    async with (
        anthropic.AsyncAnthropic(base_url=base_url, api_key="none", max_retries=0) as asking,
        asking.messages.stream(messages=[QUESTION], max_tokens=12, **GREEDY) as stream,
    ):
        assert await stream.get_final_text() == replica.answer([QUESTION], 12)


# -- counting, models


def test_tokens_are_counted_without_an_answer(replica: Replica) -> None:
    count = client(replica).messages.count_tokens(model=NAME, messages=[QUESTION], system="Be brief.")
    assert count.input_tokens == len(replica.prompt_ids([{"role": "system", "content": "Be brief."}, QUESTION]))


def test_a_prompt_too_long_to_answer_can_still_be_counted(replica: Replica) -> None:
    long: Any = {"role": "user", "content": "word " * replica.model.max_model_len}
    assert client(replica).messages.count_tokens(model=NAME, messages=[long]).input_tokens > replica.model.max_model_len
    with pytest.raises(anthropic.BadRequestError) as refused:
        create(replica, long)
    assert refused.value.error_code == "context_length_exceeded"


def test_models_are_listed_for_this_client_too(replica: Replica) -> None:
    (model,) = client(replica).models.list()
    assert (model.id, model.type, model.display_name) == (NAME, "model", NAME)
    assert client(replica).models.retrieve(NAME).created_at.year == 1970
    with pytest.raises(anthropic.NotFoundError):
        client(replica).models.retrieve("another")


# -- errors


def test_an_unknown_model_is_not_found(replica: Replica) -> None:
    with pytest.raises(anthropic.NotFoundError) as refused:
        create(replica, QUESTION, model="claude-9")
    assert (refused.value.type, refused.value.error_code) == ("not_found_error", "model_not_found")
    assert refused.value.request_id


def test_tools_that_the_server_would_have_to_run_are_refused_by_name(replica: Replica) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        create(replica, QUESTION, tools=[{"name": "web_search", "type": "web_search_20250305"}])
    assert (refused.value.type, refused.value.error_code) == ("invalid_request_error", "unsupported_parameter")
    assert refused.value.api_message.startswith("tools[0].type: ")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
def test_what_is_no_json_object_is_refused(replica: Replica, path: str, body: bytes) -> None:
    status, headers, answer = replica.call("POST", path, body)
    assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
    assert answer["request_id"] == headers["request-id"] == headers["x-request-id"]


def test_a_wrong_method_has_an_error_of_the_same_shape(replica: Replica) -> None:
    status, headers, answer = replica.call("GET", MESSAGES)
    assert (status, answer["type"], headers["allow"]) == (405, "error", "OPTIONS, POST")


def test_a_body_of_ten_megabytes_is_too_large(replica: Replica) -> None:
    with pytest.raises(anthropic.APIStatusError) as refused:
        create(replica, {"role": "user", "content": "x" * 10 * 2**20})
    assert (refused.value.status_code, refused.value.type) == (413, "request_too_large")


def test_beyond_what_may_be_open_the_server_is_overloaded() -> None:
    with serving(ServerSettings(max_open=1), step_s=0.01) as replica:
        with client(replica).messages.stream(**ENDLESS) as running:
            next(iter(running))
            with pytest.raises(anthropic.InternalServerError) as refused:
                create(replica, QUESTION)
        assert (refused.value.status_code, refused.value.type) == (529, "overloaded_error")
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert replica.final_metrics()["penstock_requests_total{overloaded,messages,529}"] == 1


def test_when_the_engine_dies_a_running_stream_is_told() -> None:
    may_return = threading.Event()
    with (
        serving(step_s=0.01, may_return=may_return, sleep=no_pause) as replica,
        client(replica).messages.stream(**ENDLESS) as stream,
    ):
        next(iter(stream))
        replica.kill_engine()
        with pytest.raises(anthropic.APIStatusError) as failed:
            list(stream)
        assert (failed.value.type, failed.value.error_code) == ("api_error", "engine_failed")
        with pytest.raises(anthropic.InternalServerError) as refused:
            create(replica, QUESTION)
        assert (refused.value.status_code, refused.value.type) == (503, "api_error")
        may_return.set()


# -- clients that go away


def test_a_stream_that_is_left_ends_its_work(slow_replica: Replica) -> None:
    with client(slow_replica).messages.stream(**ENDLESS) as stream:
        next(iter(stream))
        eventually(lambda: slow_replica.engine.measured.load.num_running, lambda number: number == 1)
    eventually(slow_replica.is_idle)


def test_a_client_that_leaves_before_its_whole_answer_ends_its_work(slow_replica: Replica) -> None:
    connection = http.client.HTTPConnection(slow_replica.host, slow_replica.port)
    connection.request("POST", MESSAGES, json.dumps(ENDLESS))
    eventually(lambda: slow_replica.engine.measured.load.num_running, lambda number: number == 1)
    connection.close()
    eventually(slow_replica.is_idle)


@pytest.mark.parametrize("path", ["/v1/messages/batches", "/v1/messages/batches/x/results"])
def test_what_is_not_there_is_said_in_this_apis_shape(replica: Replica, path: str) -> None:
    status, headers, answer = replica.call("GET", path)
    assert (status, answer["type"], answer["error"]["type"]) == (404, "error", "not_found_error")
    assert answer["request_id"] == headers["request-id"]


def test_a_tool_runner_goes_on_without_a_thread(replica: Replica) -> None:
    """It asks the server to hold the conversation first, and sends all of it when told that that cannot be."""
    body = {"messages": [QUESTION], "max_tokens": 4, "thread": {"type": "create"}}
    status, _, answer = replica.post("/v1/messages", **body)
    assert (status, answer["error"]["details"]["error_code"]) == (400, "thread_unsupported_request")
    runner = client(replica).beta.messages.tool_runner(model=NAME, max_tokens=4, messages=[QUESTION], tools=[])
    (said,) = list(runner)
    (block,) = said.content
    assert block.type == "text"
