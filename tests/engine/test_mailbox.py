import fcntl
import resource
import select
import socket
import struct
import threading
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.images import ImageInput, image_tokens
from penstock.core.measurements import EngineLoad, EngineMeasurements
from penstock.core.request import FinishReason, Priority, Request, RequestTimings, TokenEvent, TokenLogprobs
from penstock.core.sampling import SamplingParams
from penstock.engine.client import encoded
from penstock.engine.mailbox import Disconnected, FrameReader, Mailbox, frame
from penstock.engine.messages import Abort, FromEngine, StepFigures, StepReport, Stop, Submit, ToEngine
from tests.waiting import GIVE_UP_S, eventually


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def submit(index: int, prompt_length: int = 10) -> Submit:
    return Submit(Request(f"r{index}", list(range(prompt_length)), max_tokens=4))


@given(st.lists(st.binary(max_size=40), max_size=8), st.data())
def test_frames_are_the_same_wherever_the_stream_is_cut(payloads: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(len(payload).to_bytes(4, "little") + payload for payload in payloads)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)))))
    reader, found = FrameReader(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += reader.feed(stream[start:end])
    assert found == payloads


def test_frames_that_arrive_byte_by_byte_are_whole() -> None:
    reader = FrameReader()
    stream = frame(submit(1)) + frame(Stop())
    found = [payload for byte in stream for payload in reader.feed(bytes([byte]))]
    assert [msgspec.msgpack.decode(payload)["type"] for payload in found] == ["Submit", "Stop"]


def test_a_request_arrives_with_all_its_settings(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    sampling = SamplingParams(temperature=0.5, top_k=3, logit_bias={7: -1.5}, seed=-(2**63), num_logprobs=2)
    request = Request(
        "r", [1, 2], max_tokens=3, sampling=sampling, stop_token_ids=[0], priority=Priority.LOW, namespace="n"
    )
    ours.sendall(frame(Submit(request)))
    assert Mailbox(theirs).receive(wait=True) == [Submit(request)]


def test_a_request_arrives_with_its_images(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    pixels = struct.pack("6f", *range(6))
    image = ImageInput("2a" * 16, 1, 2, [1, 1, 2], [1, 2, 3], pixels)
    request = Request("r", [1, *image_tokens(image.digest, 2)], max_tokens=3, images=(image,))
    ours.sendall(frame(Submit(request)))
    assert Mailbox(theirs).receive(wait=True) == [Submit(request)]


def test_a_request_in_pieces_is_the_same(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    images = tuple(
        ImageInput(f"{number}a" * 16, 1 + number, 1, [1, 1, 1], [1], struct.pack("f", number)) for number in range(3)
    )
    ids = [1, *(token for image in images for token in image_tokens(image.digest, 1))]
    for request in (Request("r", ids, max_tokens=3, images=images, weight=2.0), Request("r", [1], max_tokens=3)):
        pieces = encoded(request)
        assert b"".join(pieces)[4:][:20] == frame(Submit(request))[4:][:20]
        ours.sendall(b"".join(pieces))
        assert Mailbox(theirs).receive(wait=True) == [Submit(request)]


def test_a_large_message_comes_in_parts_between_which_steps_can_run(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    image = ImageInput("2a" * 16, 0, 1, [1, 1, 1], [8 << 20], bytes(32 << 20))
    request = Request("r", image_tokens(image.digest, 1), max_tokens=3, images=(image,))
    sending = threading.Thread(target=ours.sendall, args=(frame(Submit(request)),))
    sending.start()
    mailbox, found, empty = Mailbox(theirs), [], 0
    while not found:
        select.select([theirs], [], [])
        found = mailbox.receive(wait=False)
        empty += not found
    sending.join()
    assert found == [Submit(request)]
    assert empty >= 3  # of eight megabytes at most


def test_a_report_arrives_with_all_its_news(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    event = TokenEvent("r", [5], FinishReason.STOP, [TokenLogprobs(-0.5, [(5, -0.5)])], 4, RequestTimings(0.1, 0.2))
    report = StepReport([event], EngineMeasurements(EngineLoad(num_running=1, kv_active_tokens=25)), StepFigures(2))
    Mailbox(theirs).send(report)
    (payload,) = FrameReader().feed(ours.recv(1 << 16))
    assert msgspec.msgpack.decode(payload, type=FromEngine) == report


def test_looking_without_waiting_finds_nothing_in_an_empty_mailbox(ends: tuple[socket.socket, socket.socket]) -> None:
    assert Mailbox(ends[1]).receive(wait=False) == []


def is_empty(end: socket.socket) -> bool:
    try:
        return not end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True


def test_waiting_goes_on_until_a_message_is_whole(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    message = frame(Abort("r"))
    ours.sendall(message[:5])
    received: list[ToEngine] = []
    waiting = threading.Thread(target=lambda: received.extend(Mailbox(theirs).receive(wait=True)))
    waiting.start()
    eventually(lambda: is_empty(theirs))  # it has read the first part
    ours.sendall(message[5:])
    waiting.join(GIVE_UP_S)
    assert received == [Abort("r")]


def test_a_burst_of_submits_arrives_complete_and_in_order(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    burst = [submit(index, prompt_length=500) for index in range(1000)]
    writer = threading.Thread(target=ours.sendall, args=[b"".join(map(frame, burst))])
    writer.start()
    mailbox = Mailbox(theirs)
    received: list[ToEngine] = []
    while len(received) < len(burst):
        received += mailbox.receive(wait=True)
    writer.join()
    assert received == burst


def test_a_closed_socket_is_a_server_that_is_gone(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    mailbox = Mailbox(theirs)
    ours.close()
    with pytest.raises(Disconnected):
        mailbox.receive(wait=False)
    with pytest.raises(Disconnected):
        mailbox.send(StepReport([]))


def test_a_server_that_dies_with_unread_reports_is_gone_too(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    mailbox = Mailbox(theirs)
    mailbox.send(StepReport([]))
    ours.close()  # what it had not read makes the kernel reset the connection
    with pytest.raises(Disconnected):
        mailbox.receive(wait=True)


def test_the_socket_may_have_any_number(ends: tuple[socket.socket, socket.socket]) -> None:
    """A server with many open connections hands its next engine a high descriptor."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= 1100:
        pytest.skip("this process may not have so many open files")
    ours, theirs = ends
    with socket.socket(fileno=fcntl.fcntl(theirs, fcntl.F_DUPFD, 1100)) as high:
        ours.sendall(frame(Stop()))
        assert Mailbox(high).receive(wait=True) == [Stop()]
