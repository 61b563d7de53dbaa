import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from penstock.api.relay import (
    Envelope,
    Origin,
    StreamRecord,
    UnitWriter,
    carry_on_comment,
    cost_comment,
    find_cost,
    open_envelope,
    origin_comment,
)
from penstock.core.errors import EngineFailed, InvalidRequest
from penstock.core.request import Cost

ORIGIN = Origin(id="ab", created=1, seed=-7)
REQUEST = b'{"model": "m",  "stream": true}'


def event(number: int) -> bytes:
    return b'data: {"text":"%d : [0,[1]]"}\n\n' % number


def opened(record: StreamRecord) -> Envelope:
    envelope = record.envelope(REQUEST)
    assert envelope is not None
    return open_envelope(envelope)


def test_a_unit_stands_before_the_events_that_come_of_it() -> None:
    writer = UnitWriter()
    assert writer.unit(0, [12, 34], 96, [event(1), event(2)]) == b": [0,[12,34],96]\n\n" + event(1) + event(2)
    assert writer.unit(1, [5], 0, [event(3)]) == b": [1,[5]]\n\n" + event(3)


def test_ids_whose_text_is_held_back_come_with_the_next_event_of_their_choice() -> None:
    writer = UnitWriter()
    assert writer.unit(0, [1], 8, []) == b""
    assert writer.unit(1, [7], 0, [event(1)]) == b": [1,[7]]\n\n" + event(1)
    assert writer.unit(0, [2], 0, []) == b""
    assert writer.unit(0, [3], 0, [event(2)]) == b": [0,[1,2,3],8]\n\n" + event(2)


def test_events_that_the_client_has_are_left_out() -> None:
    writer = UnitWriter(num_sent=3)
    assert writer.known([event(1), event(2)]) == b""
    assert writer.known([event(3), event(4)]) == event(4)


def test_a_record_knows_the_units_and_how_far_the_last_one_got() -> None:
    record = StreamRecord()
    record.append(origin_comment(ORIGIN) + event(0))
    assert opened(record).resume == msgspec.json.decode(
        b'{"origin":{"id":"ab","created":1,"seed":-7},"num_events":1}', type=type(opened(record).resume)
    )
    writer = UnitWriter()
    record.append(writer.unit(0, [5], 16, [event(1)]) + b": keep-alive\n\n" + writer.unit(0, [6], 0, [event(2)]))
    record.append(event(3) + b": [0,[99]]\n\n" + carry_on_comment(EngineFailed("x")))
    assert record.is_given_back
    envelope = opened(record)
    assert bytes(envelope.request) == REQUEST
    assert envelope.resume is not None
    assert envelope.resume.outputs() == {0: [5, 6]}, "99 had no event"
    assert envelope.resume.num_events == 2
    assert not record.is_given_back
    assert record.num_tokens == 2
    assert record.counts == (2, 16)


def test_what_is_no_relayed_stream_cannot_be_carried_on() -> None:
    record = StreamRecord()
    assert record.envelope(REQUEST) is None
    assert not record.is_given_back
    record.append(event(1))
    assert record.envelope(REQUEST) is None


def test_a_unit_without_events_is_refused() -> None:
    body = b'{"request":{},"resume":{"origin":{"id":"a","created":1,"seed":1},"units":[[0,[1]]],"num_events":0}}'
    with pytest.raises(InvalidRequest):
        open_envelope(body)


@given(
    blocks=st.lists(st.integers(0, 2), max_size=40),
    sizes=st.lists(st.integers(1, 7), min_size=40, max_size=40),
    fold_bytes=st.sampled_from([1, 50, 200]),
)
def test_folding_changes_nothing(blocks: list[int], sizes: list[int], fold_bytes: int) -> None:
    """However the blocks arrive, with units that have no event, one, or several."""
    stream = [origin_comment(ORIGIN)]
    for number, kind in enumerate(blocks):
        is_unit = kind == 0 and not stream[-1].startswith(b": [")
        stream.append(b": [%d,[%d],%d]\n\n" % (number % 2, number, number % 3) if is_unit else event(number))
    whole, folded = StreamRecord(), StreamRecord(fold_bytes)
    whole.append(b"".join(stream))
    parts = iter(stream)
    for size in sizes:
        folded.append(b"".join(part for _, part in zip(range(size), parts, strict=False)))
    folded.append(b"".join(parts))
    assert folded.counts == whole.counts
    assert folded.envelope(REQUEST) == whole.envelope(REQUEST)


@given(st.floats(0, 1e9), st.floats(0, 1e12))
def test_a_cost_is_read_as_it_was_written(device_s: float, kv_block_s: float) -> None:
    found = find_cost(event(1) + cost_comment(Cost(device_s, kv_block_s)) + event(2) + b"data: [DONE]\n\n")
    assert found is not None
    assert found.device_s == pytest.approx(device_s, rel=1e-8)
    assert found.kv_block_s == pytest.approx(kv_block_s, rel=1e-5)


@pytest.mark.parametrize(
    "end", [b"", event(1), b'data: {"text":": cost 1 2"}\n\n', b": cost nan 1\n\n", b": cost 1\n\n"]
)
def test_what_is_no_cost_is_none(end: bytes) -> None:
    assert find_cost(end) is None


def test_a_record_keeps_the_cost_of_every_replica_that_gave_the_stream_back() -> None:
    record = StreamRecord()
    for _ in range(2):
        record.append(
            origin_comment(ORIGIN) + event(0) + cost_comment(Cost(0.5, 2.0)) + carry_on_comment(EngineFailed(""))
        )
        assert record.cost == record.cost_elsewhere + Cost(0.5, 2.0)
        record.envelope(REQUEST)
        assert record.cost == record.cost_elsewhere
    assert record.cost_elsewhere == Cost(1.0, 4.0)
    record.append(event(1) + cost_comment(Cost(0.25, 1.0)))
    record.append(b"data: [DONE]\n\n")
    assert record.cost == Cost(1.25, 5.0)


def test_a_record_without_a_cost_has_none() -> None:
    record = StreamRecord()
    record.append(origin_comment(ORIGIN) + event(0))
    assert record.cost is None
