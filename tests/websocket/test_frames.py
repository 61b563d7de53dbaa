"""The codec, held to the `websockets` library as its peer, and to hostile bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.client import ClientProtocol
from websockets.frames import CloseCode as PeerCode
from websockets.frames import Frame, Opcode
from websockets.protocol import CLIENT, OPEN, Protocol
from websockets.uri import parse_uri

from penstock.websocket import frames
from penstock.websocket.frames import Close, CloseCode, Event, FrameError, FrameReader, Message, Ping, Pong

MAX_BYTES = 1 << 19
KEY = b"\x01\x02\x03\x04"

texts = st.text(max_size=300) | st.text(min_size=1, max_size=9).map(lambda text: text * 9000)  # a length in eight bytes


def peer() -> Protocol:
    found = Protocol(CLIENT, max_size=None)
    found.state = OPEN
    return found


def events(data: bytes, cuts: Iterable[int] = (), max_bytes: int = MAX_BYTES) -> list[Event]:
    """Events of bytes that come in pieces, cut at these places."""
    reader, found, at = FrameReader(max_bytes), [], 0
    for cut in sorted(min(cut, len(data)) for cut in (*cuts, len(data))):
        found += reader.feed(data[at:cut])
        at = cut
    return found


def client_frame(opcode: int, payload: bytes, *, is_final: bool = True, first: int = 0) -> bytes:
    length = len(payload)
    size = bytes((length,)) if length < 126 else b"\x7e" + struct.pack("!H", length)
    size = bytes((size[0] | 0x80,)) + size[1:]
    masked = bytes(byte ^ KEY[at % 4] for at, byte in enumerate(payload))
    return bytes((is_final << 7 | first | opcode,)) + size + KEY + masked


def refusal(data: bytes, max_bytes: int = MAX_BYTES) -> FrameError:
    with pytest.raises(FrameError) as refused:
        events(data, max_bytes=max_bytes)
    return refused.value


@given(
    said=st.lists(texts | st.binary(max_size=100)),
    pings=st.lists(st.binary(max_size=125), max_size=2),
    cuts=st.lists(st.integers(0, 3000), max_size=8),
)
def test_what_the_library_sends_is_read_as_it_was_meant_however_it_is_cut(
    said: list[str | bytes], pings: list[bytes], cuts: list[int]
) -> None:
    client = peer()
    for one in said:
        if isinstance(one, str):
            client.send_text(one.encode())
        else:
            client.send_binary(one)
        for data in pings:
            client.send_ping(data)
    client.send_close(1000, "bye")
    sent = b"".join(client.data_to_send())
    wanted: list[Event] = []
    for one in said:
        wanted.append(Message(one.encode() if isinstance(one, str) else one, isinstance(one, str)))
        wanted += map(Ping, pings)
    assert events(sent, cuts) == [*wanted, Close(1000, "bye")]


@given(
    parts=st.lists(st.text(max_size=40), min_size=2, max_size=5), ping=st.binary(max_size=20), cut=st.integers(0, 99)
)
def test_fragments_are_put_together_with_control_frames_between_them(parts: list[str], ping: bytes, cut: int) -> None:
    pieces = [part.encode() for part in parts]
    sent = client_frame(Opcode.TEXT, pieces[0], is_final=False)
    for piece in pieces[1:-1]:
        sent += client_frame(Opcode.PING, ping) + client_frame(Opcode.CONT, piece, is_final=False)
    sent += client_frame(Opcode.PONG, ping) + client_frame(Opcode.CONT, pieces[-1])
    wanted = [Ping(ping)] * (len(parts) - 2) + [Pong(ping), Message("".join(parts).encode(), True)]
    assert events(sent, [cut]) == wanted


@given(said=texts, code=st.sampled_from([1000, 1001, 1008, 1013, 4000]), reason=st.text(max_size=100))
def test_what_is_written_is_what_the_library_reads(said: str, code: int, reason: str) -> None:
    client = peer()
    client.receive_data(frames.text(said.encode()) + frames.ping(b"x") + frames.close(code, reason))
    text, ping, _ = client.events_received()
    assert isinstance(text, Frame)
    assert (text.opcode, bytes(text.data).decode()) == (Opcode.TEXT, said)
    assert isinstance(ping, Frame)
    assert (ping.opcode, bytes(ping.data)) == (Opcode.PING, b"x")
    closed = client.close_rcvd
    assert closed is not None
    assert closed.code == code
    assert reason.startswith(closed.reason)
    assert len(closed.reason.encode()) > min(len(reason.encode()), 123) - 4


@given(noise=st.binary(max_size=400), cuts=st.lists(st.integers(0, 400), max_size=4))
def test_noise_is_events_or_a_refusal_and_the_same_however_it_is_cut(noise: bytes, cuts: list[int]) -> None:
    def outcome(cuts: list[int]) -> tuple[list[Event], object]:
        reader, found, at = FrameReader(1000), [], 0
        try:
            for cut in sorted(min(cut, len(noise)) for cut in (*cuts, len(noise))):
                for event in reader.feed(noise[at:cut]):
                    found.append(event)
                at = cut
        except FrameError as error:
            return found, (error.code, error.reason)
        return found, None

    assert outcome(cuts) == outcome([])


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\x81\x01a", CloseCode.PROTOCOL_ERROR),  # no mask
        (client_frame(1, b"a", first=0x40), CloseCode.PROTOCOL_ERROR),  # compressed, which nobody agreed on
        (client_frame(3, b"a"), CloseCode.PROTOCOL_ERROR),  # no such opcode
        (client_frame(0xB, b"a"), CloseCode.PROTOCOL_ERROR),
        (client_frame(9, b"a", is_final=False), CloseCode.PROTOCOL_ERROR),  # a control frame in pieces
        (client_frame(9, b"a" * 126), CloseCode.PROTOCOL_ERROR),  # or a long one
        (client_frame(0, b"a"), CloseCode.PROTOCOL_ERROR),  # the end of what did not begin
        (client_frame(1, b"a", is_final=False) + client_frame(1, b"b"), CloseCode.PROTOCOL_ERROR),
        (b"\x81\xfe\x00\x01" + KEY, CloseCode.PROTOCOL_ERROR),  # a length in more bytes than it needs
        (b"\x81\xff" + b"\x00" * 7 + b"\x01" + KEY, CloseCode.PROTOCOL_ERROR),
        (b"\x81\xff" + b"\xff" * 8 + KEY, CloseCode.MESSAGE_TOO_BIG),
        (client_frame(8, b"a"), CloseCode.PROTOCOL_ERROR),  # half a close code
        (client_frame(8, struct.pack("!H", 1005)), CloseCode.PROTOCOL_ERROR),  # codes that are never sent
        (client_frame(8, struct.pack("!H", 999)), CloseCode.PROTOCOL_ERROR),
        (client_frame(8, struct.pack("!H", 5000)), CloseCode.PROTOCOL_ERROR),
        (client_frame(8, struct.pack("!H", 1000) + b"\xff"), CloseCode.INVALID_DATA),
        (client_frame(1, b"\xc3"), CloseCode.INVALID_DATA),
        (client_frame(1, b"\xed\xa0\x80"), CloseCode.INVALID_DATA),  # half of a surrogate pair
        (client_frame(1, b"\xc3", is_final=False) + client_frame(0, b"\x28"), CloseCode.INVALID_DATA),
    ],
)
def test_hostile_frames_are_refused_with_their_code(data: bytes, code: CloseCode) -> None:
    assert refusal(data).code == code


def test_a_message_is_refused_as_soon_as_its_length_is_too_large() -> None:
    assert refusal(b"\x81\xfe\x03\xe9" + KEY, max_bytes=1000).code == CloseCode.MESSAGE_TOO_BIG
    pieces = client_frame(1, b"a" * 600, is_final=False) + client_frame(0, b"a" * 401, is_final=False)[:8]
    assert refusal(pieces, max_bytes=1000).code == CloseCode.MESSAGE_TOO_BIG
    assert events(client_frame(1, b"a" * 600, is_final=False) + client_frame(0, b"a" * 400), max_bytes=1000)


def test_a_character_may_be_cut_by_fragments() -> None:
    pieces = client_frame(1, b"\xc3", is_final=False) + client_frame(0, b"\xa9")
    assert events(pieces) == [Message("é".encode(), True)]


def test_nothing_is_read_after_a_close_or_a_refusal() -> None:
    reader = FrameReader(MAX_BYTES)
    assert list(reader.feed(client_frame(8, b"") + client_frame(1, b"late"))) == [Close(CloseCode.NONE, "")]
    assert list(reader.feed(client_frame(1, b"later"))) == []
    assert PeerCode(CloseCode.NONE) is PeerCode.NO_STATUS_RCVD


def test_a_reader_says_what_room_a_message_wants() -> None:
    reader = FrameReader(MAX_BYTES)
    assert not reader.is_inside
    frame = client_frame(1, b"a" * 5000, is_final=False)
    list(reader.feed(frame[:100]))
    assert (reader.is_inside, reader.wanted_bytes) == (True, 5000)
    list(reader.feed(frame[100:] + client_frame(0, b"b" * 300)[:20]))
    assert reader.wanted_bytes == 5300


def test_the_library_takes_our_side_of_the_handshake() -> None:
    from penstock.websocket import handshake

    client = ClientProtocol(parse_uri("ws://x/"), subprotocols=["bearer.secret", "penstock.v1"])  # type: ignore[list-item]
    request = client.connect()
    headers = {name.lower().encode(): value.encode() for name, value in request.headers.raw_items()}
    handshake.check(headers)
    offer = handshake.read_offer(headers)
    assert offer == ("penstock.v1", "secret")
    lines = handshake.answer(headers, offer.protocol)
    client.send_request(request)
    client.receive_data(
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n%b\r\n" % lines
    )
    assert (client.state, client.subprotocol) == (OPEN, "penstock.v1")
