"""What a `Network` promises, whatever moves the bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.transfer.messages import Ended
from penstock.transfer.ports import Asked, Credited, Dropped, Heard, Kept, PeerGone, Told
from tests.transfer.networks import MOVERS, SIDES, Pair, chain, linked, pair_of, serve
from tests.waiting import eventually


@pytest.fixture(params=MOVERS)
def mover(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(mover: str) -> Iterator[Pair]:
    with pair_of(mover) as made:
        yield made


def test_blocks_come_with_the_content_that_they_had_and_in_order(pair: Pair) -> None:
    pair.ask(1, chain(3))
    pair.puller.network.land(1, [5, 6, 7])
    peer = serve(pair, 1, [2, 9, 4])
    pair.lender.network.end(peer, Ended(1))
    told = eventually(lambda: pair.puller.told(1))
    assert told is not None
    assert told.ended == Ended(1)
    assert pair.puller.landed(1) == [0, 1, 2]
    theirs = [pair.lender.memory.content(block_id) for block_id in (2, 9, 4)]
    assert [pair.puller.memory.content(block_id) for block_id in (5, 6, 7)] == theirs
    assert pair.puller.memory.content(8) == [-1] * 4, "nothing else was written"
    eventually(lambda: pair.lender.num_sent(1), lambda n: n == 3)


def test_messages_of_both_sides_arrive(pair: Pair) -> None:
    pair.ask(1, chain(2))
    (asked,) = eventually(lambda: pair.lender.events(Asked), len)
    assert isinstance(asked, Asked)
    assert asked.ask.hashes == chain(2)
    pair.puller.network.land(1, [0, 1])
    (credited,) = eventually(lambda: pair.lender.events(Credited), len)
    assert credited == Credited(asked.peer, 1, 2)
    pair.puller.network.keep([1])
    assert eventually(lambda: pair.lender.events(Kept), len) == [Kept(asked.peer, [1])]
    pair.lender.network.working(asked.peer, [1])
    assert eventually(lambda: pair.puller.events(Heard), len) == [Heard([1])]
    pair.puller.network.drop(1)
    pair.puller.network.drop(1)
    assert eventually(lambda: pair.lender.events(Dropped), len) == [Dropped(asked.peer, 1)]
    pair.lender.network.end(asked.peer, Ended(1, "dropped"))
    assert eventually(lambda: pair.puller.told(1)) == Told(Ended(1, "dropped"))


def test_blocks_that_there_is_no_room_for_are_written_nowhere(pair: Pair) -> None:
    pair.ask(1, chain(2))
    (asked,) = eventually(lambda: pair.lender.events(Asked), len)
    assert isinstance(asked, Asked)
    pair.lender.network.send(asked.peer, 1, 0, [3, 4])
    pair.lender.network.end(asked.peer, Ended(1))
    eventually(lambda: pair.puller.told(1))
    assert pair.puller.landed(1) == []
    assert all(pair.puller.memory.content(block_id) == [-1] * 4 for block_id in range(16))


def test_a_ticket_is_told_its_end_exactly_once(pair: Pair) -> None:
    for ticket in (1, 2, 3):
        pair.ask(ticket, chain(1))
    peer = serve_asks(pair, 3)
    pair.lender.network.end(peer, Ended(1))
    pair.lender.network.end(peer, Ended(1, "again"))
    eventually(lambda: pair.puller.told(1))
    pair.puller.network.hang_up(2)
    eventually(lambda: pair.puller.told(3))
    pair.puller.network.hang_up(3)
    assert eventually(lambda: pair.lender.events(PeerGone), len) == [PeerGone(peer)]
    ends = [event.ended.ticket for event in pair.puller.events(Told) if isinstance(event, Told)]
    assert sorted(ends) == [1, 2, 3]


def serve_asks(pair: Pair, count: int) -> int:
    asked = eventually(lambda: pair.lender.events(Asked), lambda found: len(found) == count)
    assert isinstance(asked[0], Asked)
    return asked[0].peer


def test_a_lender_that_goes_ends_all_tickets_and_a_puller_that_goes_is_told(pair: Pair) -> None:
    pair.ask(1, chain(1))
    pair.ask(2, chain(1))
    peer = serve_asks(pair, 2)
    pair.lender.network.close()
    assert eventually(lambda: pair.puller.told(1)) is not None
    assert eventually(lambda: pair.puller.told(2)) is not None
    assert eventually(lambda: pair.lender.events(PeerGone), len) == [PeerGone(peer)]
    pair.lender.network.send(peer, 1, 0, [1])  # to nobody
    pair.lender.network.end(peer, Ended(1))
    pair.ask(3, chain(1))
    told = eventually(lambda: pair.puller.told(3))
    assert told is not None
    assert told.ended.reason


def test_after_a_connection_was_lost_the_next_ask_makes_another(pair: Pair) -> None:
    pair.ask(1, chain(1))
    first = serve_asks(pair, 1)
    pair.puller.network.hang_up(1)
    eventually(lambda: pair.puller.told(1))
    eventually(lambda: pair.lender.events(PeerGone), len)
    pair.ask(2, chain(1))
    pair.puller.network.land(2, [11])
    peer = serve(pair, 2, [6])
    assert peer != first
    pair.lender.network.end(peer, Ended(2))
    eventually(lambda: pair.puller.told(2))
    assert pair.puller.memory.content(11) == pair.lender.memory.content(6)


def test_a_ticket_that_is_dropped_while_blocks_are_on_their_way_ends_after_them(pair: Pair) -> None:
    """Blocks of either side may be reused only then."""
    pair.ask(1, chain(3))
    pair.puller.network.land(1, [5, 6, 7])
    peer = serve(pair, 1, [2, 9, 4])
    pair.puller.network.drop(1)
    eventually(lambda: pair.lender.events(Dropped), len)
    pair.lender.network.end(peer, Ended(1, "dropped"))
    assert eventually(lambda: pair.puller.told(1)) == Told(Ended(1, "dropped"))
    assert pair.lender.num_sent(1) == 3, "whoever lends knows first that its memory is not looked at any more"
    pair.lender.memory.fill(plus=1)
    before = [pair.puller.memory.content(block_id) for block_id in range(16)]
    pair.ask(2, chain(1))
    pair.puller.network.land(2, [0])
    serve(pair, 2, [3])
    eventually(lambda: pair.puller.landed(2), len)
    assert [pair.puller.memory.content(block_id) for block_id in range(1, 16)] == before[1:]


def test_engines_with_different_secrets_do_not_meet(mover: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", "penstock.transfer")
    with linked(SIDES[mover]("one"), SIDES[mover]("two")) as pair:
        pair.ask(1, chain(1))
        told = eventually(lambda: pair.puller.told(1))
        assert told is not None
        assert "another secret (gateway_secret)" in told.ended.reason


def test_a_lender_that_starts_again_is_met_anew_and_its_new_memory_is_read(
    mover: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", "penstock.transfer")
    puller = SIDES[mover](epoch="puller")
    first = SIDES[mover](epoch="first")
    with linked(puller, first) as pair:
        pulled(pair, 1, [2])
        port = int(pair.address.rpartition(":")[2])
        first.network.close()
        eventually(puller.network.sources_by_mover, lambda found: not found)
        second = SIDES[mover](epoch="second")
        second.memory.fill(plus=7)
        second.network.listen("127.0.0.1", port)
        pair.lender = second
        pulled(pair, 2, [2])
        second.network.close()


def pulled(pair: Pair, ticket: int, block_ids: list[int]) -> None:
    """Pull these to the same places, and compare."""
    pair.ask(ticket, chain(len(block_ids)))
    pair.puller.network.land(ticket, block_ids)
    pair.lender.network.end(serve(pair, ticket, block_ids), Ended(ticket))
    assert eventually(lambda: pair.puller.told(ticket)) == Told(Ended(ticket))
    for block_id in block_ids:
        assert pair.puller.memory.content(block_id) == pair.lender.memory.content(block_id)


def test_an_engine_that_withdraws_is_pulled_from_again_only_when_it_offers_its_memory_again(pair: Pair) -> None:
    pulled(pair, 1, [2])
    pair.ask(2, chain(1))
    serve_asks(pair, 2)
    pair.lender.network.withdraw()
    assert eventually(lambda: pair.puller.told(2)) is not None
    eventually(pair.puller.network.sources_by_mover, lambda found: not found)
    pair.ask(3, chain(1))
    assert eventually(lambda: pair.puller.told(3)) == Told(Ended(3, "it is parked"))
    eventually(pair.puller.network.sources_by_mover, lambda found: not found)
    pair.lender.memory.fill(plus=3)
    pair.lender.network.offer_again()
    pulled(pair, 4, [2, 5])


def test_the_mover_in_use_is_known(pair: Pair, mover: str) -> None:
    assert pair.puller.network.sources_by_mover() == {}
    pair.ask(1, chain(1))
    serve_asks(pair, 1)
    assert eventually(pair.puller.network.sources_by_mover) == {mover: 1}


def test_many_tickets_of_one_connection_do_not_mix(pair: Pair) -> None:
    for ticket in range(1, 9):
        pair.ask(ticket, chain(2))
        pair.puller.network.land(ticket, [2 * ticket - 2, 2 * ticket - 1])
    for ticket in range(8, 0, -1):
        peer = serve(pair, ticket, [2 * ticket - 1, 2 * ticket - 2])
        pair.lender.network.end(peer, Ended(ticket))
    for ticket in range(1, 9):
        eventually(lambda ticket=ticket: pair.puller.told(ticket))
        assert pair.puller.memory.content(2 * ticket - 2) == pair.lender.memory.content(2 * ticket - 1)
        assert pair.puller.memory.content(2 * ticket - 1) == pair.lender.memory.content(2 * ticket - 2)


def test_the_descriptor_can_be_read_only_while_there_is_something_to_take(pair: Pair) -> None:
    """Else an engine with nothing to do would never sleep."""
    import select

    pair.ask(1, chain(1))
    serve_asks(pair, 1)
    pair.lender.network.take()
    readable, _, _ = select.select([pair.lender.network.descriptor], [], [], 0)
    assert readable == []
