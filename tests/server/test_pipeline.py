"""The last step of the pipeline, without HTTP and without an engine: pieces in, bytes at a sink."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.api import sse
from penstock.api.relay import Origin, StreamRecord
from penstock.api.sink import Headers
from penstock.core.errors import EngineFailed, InvalidRequest, PenstockError, RequestAborted
from penstock.core.model_config import ModelConfig
from penstock.core.request import FinishReason
from penstock.core.settings import ServerSettings
from penstock.hub.watermarks import WatermarkFile
from penstock.observe.catalog import CATALOG
from penstock.observe.registry import Registry
from penstock.server.anthropic_routes import MESSAGES
from penstock.server.choices import Piece
from penstock.server.gateway_headers import GatewayHeaders
from penstock.server.generation import Generation, Times
from penstock.server.guides import GuideTrials
from penstock.server.images import Images
from penstock.server.offload import Offload
from penstock.server.openai_routes import CHAT, COMPLETIONS
from penstock.server.pipeline import Api, Frames, RelayedFrames, Writer, write_stream
from penstock.server.prepare import PreparedRequest, Preparer
from penstock.server.served_model import ServedModel
from penstock.text.chat import ChatTemplate
from penstock.text.stops import StopStrings
from tests.clocks import ManualClock
from tests.text import small

TURN = [{"role": "user", "content": "hello"}]
HEADERS = GatewayHeaders(b"", Origin("ab", 5, 7))
HELLO = [
    [Piece(0, "Hel", None, None, token_ids=[1]), Piece(0, "lo", None, None, token_ids=[2])],
    [Piece(0, "", None, None, token_ids=[3])],  # half a character: its text is held back
    [Piece(0, "é", None, FinishReason.STOP, token_ids=[4])],
]


class ListSink:
    """Keeps what is written; after `max_writes` its client has gone."""

    def __init__(self, max_writes: int = 100) -> None:
        self.is_started, self.is_ended = False, False
        self.head: tuple[int, dict[bytes, bytes]] | None = None
        self.written: list[bytes] = []
        self._max_writes = max_writes

    async def start(self, status: int, headers: Headers = ()) -> None:
        assert not self.is_started
        self.is_started, self.head = True, (status, dict(headers))

    async def write(self, data: bytes, is_last: bool = False) -> None:
        assert self.is_started
        assert not self.is_ended
        if len(self.written) == self._max_writes:
            raise RequestAborted("the client went away")
        self.is_ended = is_last
        self.written += [data] if data else []

    @property
    def events(self) -> list[Any]:
        """The JSON of each event, comments left out."""
        blocks = b"".join(self.written).split(b"\n\n")[:-1]
        data = [block.rpartition(b"data: ")[2] for block in blocks if not block.startswith(b":")]
        return [one.decode() if one == b"[DONE]" else json.loads(one) for one in data]


def small_model() -> ServedModel:
    tokenizer = small.load(small.byte_level())
    config = ModelConfig(
        architecture="llama",
        vocab_size=tokenizer.vocab_size,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        context_length=4096,
        eos_token_ids=(2,),
    )
    return ServedModel("small", config, tokenizer, ChatTemplate("{{ messages }}"), max_model_len=64, created=1)


def written_by(api: Api, body: dict[str, object]) -> tuple[Writer, Generation]:
    """The writer of an answer that is yet to come."""
    model = small_model()
    wanted = api.parse(json.dumps({"model": "small", "stream": True, **body}).encode()).wanted
    echoed = ["abc"] if api is COMPLETIONS else None
    prepared = PreparedRequest(model, wanted, HEADERS, [[1, 2, 3]], StopStrings(()), echoed=echoed)
    generation = Generation(prepared, "id", Times(0.0))
    return api.writer(prepared, generation), generation


async def no_text() -> bytes:
    raise AssertionError("there is no guide to be tried")


async def test_the_text_that_a_client_expects_is_told_to_the_engine(tmp_path: Path) -> None:
    model = small_model()
    with ThreadPoolExecutor(1) as pool:
        offload, watermarks = Offload(pool), WatermarkFile(tmp_path / "watermarks.json")
        guides = GuideTrials(no_text, [], Registry(CATALOG), ManualClock())
        preparer = Preparer(
            model, offload, guides, watermarks, watermark=None, max_open=9, images=Images(model, ServerSettings())
        )
        expected = {"type": "content", "content": "hello " * 99}
        body = json.dumps({"model": "small", "messages": TURN, "max_tokens": 1, "n": 2, "prediction": expected})
        prepared = await preparer.prepare(CHAT.parse, replace(HEADERS, body=body.encode()))
    generation = Generation(prepared, "id", Times(0.0))
    ids = model.tokenizer.encode("hello " * 99, add_special_tokens=False)[:64]
    assert [request.predicted_ids for request in generation._requests] == [ids, ids]


async def following(batches: list[list[Piece]], error: PenstockError | None = None) -> AsyncIterator[list[Piece]]:
    for pieces in batches:
        yield pieces
    if error is not None:
        raise error


def streamed(frames: Frames, sink: ListSink, batches: list[list[Piece]], error: PenstockError | None = None) -> None:
    asyncio.run(write_stream(sink, frames, batches[0], following(batches[1:], error), [(b"x", b"y")]))


def test_pieces_that_come_together_are_one_write_and_those_without_text_are_none() -> None:
    sink = ListSink()
    writer, _ = written_by(CHAT, {"messages": TURN})
    streamed(Frames(writer, sse.error_event), sink, HELLO)
    assert sink.head is not None
    status, headers = sink.head
    assert (status, headers[b"x"], sink.is_ended) == (200, b"y", True)
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert len(sink.written) == 3  # the opening with what came first, the end of the text, the end of the stream
    *chunks, done = sink.events
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [
        {"role": "assistant", "content": ""},
        *({"content": text} for text in ("Hel", "lo", "é")),
        {},
    ]
    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-ab"}


def test_each_api_writes_the_same_pieces_as_its_clients_read_them() -> None:
    texts = []
    for api, body in ((COMPLETIONS, {"prompt": "abc"}), (MESSAGES, {"messages": TURN, "max_tokens": 9})):
        sink = ListSink()
        writer, _ = written_by(api, body)
        streamed(Frames(writer, sse.error_event), sink, HELLO)
        texts.append(sink.events)
    completion, message = texts
    assert [chunk["choices"][0]["text"] for chunk in completion[:-1]] == ["abc", "Hel", "lo", "é", ""]
    kinds = [event["type"] for event in message]
    assert kinds == [
        "message_start",
        "content_block_start",
        "ping",
        *(3 * ["content_block_delta"]),
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(event["delta"]["text"] for event in message if "text" in event.get("delta", {})) == "Helloé"


@pytest.mark.parametrize("api", [CHAT, COMPLETIONS, MESSAGES])
def test_a_whole_answer_has_the_text_of_its_stream(api: Api) -> None:
    body = {"prompt": "abc"} if api is COMPLETIONS else {"messages": TURN, "max_tokens": 9}
    writer, _ = written_by(api, body)
    whole = json.loads(writer.whole([piece for pieces in HELLO for piece in pieces]))
    found = {
        "chat": lambda: whole["choices"][0]["message"]["content"],
        "completions": lambda: whole["choices"][0]["text"].removeprefix("abc"),
        "messages": lambda: whole["content"][0]["text"],
    }
    assert found[api.route]() == "Helloé"


def test_an_error_is_told_at_the_end_of_the_stream_and_goes_on_to_the_caller() -> None:
    sink = ListSink()
    writer, _ = written_by(CHAT, {"messages": TURN})
    with pytest.raises(EngineFailed):
        streamed(Frames(writer, sse.error_event), sink, HELLO[:1], EngineFailed("it died"))
    assert sink.is_ended
    assert sink.events[-1]["error"]["message"] == "it died"


def test_nothing_is_written_for_a_client_that_has_gone() -> None:
    sink = ListSink(max_writes=1)
    writer, _ = written_by(CHAT, {"messages": TURN})
    with pytest.raises(RequestAborted):
        streamed(Frames(writer, sse.error_event), sink, HELLO)
    assert (len(sink.written), sink.is_ended) == (1, False)


def test_a_relayed_stream_reads_the_same_and_says_what_another_replica_needs() -> None:
    plain, relayed = ListSink(), ListSink()
    streamed(Frames(written_by(CHAT, {"messages": TURN})[0], sse.error_event), plain, HELLO)
    writer, generation = written_by(CHAT, {"messages": TURN})
    streamed(RelayedFrames(writer, sse.error_event, HEADERS, generation), relayed, HELLO)
    assert relayed.events == plain.events
    record = StreamRecord()
    record.append(b"".join(relayed.written))
    assert (record.stream_id, record.num_tokens, record.prompt_tokens, record.is_given_back) == ("ab", 4, 3, False)


@pytest.mark.parametrize(("error", "is_given_back"), [(EngineFailed("it died"), True), (InvalidRequest("no"), False)])
def test_a_relayed_stream_is_given_back_unless_the_request_is_at_fault(
    error: PenstockError, is_given_back: bool
) -> None:
    sink = ListSink()
    writer, generation = written_by(CHAT, {"messages": TURN})
    with pytest.raises(type(error)):
        streamed(RelayedFrames(writer, sse.error_event, HEADERS, generation), sink, HELLO[:1], error)
    record = StreamRecord()
    record.append(b"".join(sink.written))
    assert record.is_given_back is is_given_back
    assert ("error" in sink.events[-1]) is not is_given_back
