"""A man in the middle changes each byte of a connection, or ends it there: whatever has landed then is right, and
whoever waits is told."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import pytest

from penstock.transfer.messages import Ended
from penstock.transfer.ports import Asked
from tests.transfer.networks import MOVERS, Pair, chain, pair_of
from tests.transfer.relay import Change, Relay, as_it_is, cut_at, flip

PLACES, SOURCES = [5, 6, 7], [2, 9, 4]
_QUIET = 6  # looks at a network on which nothing happens, after which it is hung up, as engines do


@contextlib.contextmanager
def met(mover: str, up: Change = as_it_is, down: Change = as_it_is) -> Iterator[tuple[Pair, Relay]]:
    with pair_of(mover) as pair:
        relay = Relay(int(pair.address.rpartition(":")[2]), up=up, down=down)
        pair.address = relay.address
        try:
            yield pair, relay
        finally:
            relay.close()


def pull(pair: Pair, *, hangs_up: bool = True) -> int:
    """How many blocks have landed when the ticket is told its end."""
    pair.ask(1, chain(len(PLACES)))
    pair.puller.network.land(1, PLACES)
    num_served = num_quiet = num_seen = 0
    while pair.puller.told(1) is None:
        asked = [event for event in pair.lender.events(Asked) if isinstance(event, Asked)]
        for event in asked[num_served:]:
            pair.lender.network.send(event.peer, event.ask.ticket, 0, SOURCES)
            pair.lender.network.end(event.peer, Ended(event.ask.ticket))
        num_served = len(asked)
        pair.puller.network.wait(0.02)
        seen = len(pair.puller.seen) + len(pair.lender.seen)
        num_quiet = num_quiet + 1 if seen == num_seen else 0
        num_seen = seen
        if hangs_up and num_quiet >= (_QUIET if num_served else 10 * _QUIET):  # some movers need time to meet
            num_quiet = 0
            pair.puller.network.hang_up(1)
    landed = pair.puller.landed(1)
    assert landed == list(range(len(landed)))
    for index in landed:
        assert pair.puller.memory.content(PLACES[index]) == pair.lender.memory.content(SOURCES[index])
    others = [block_id for block_id in range(16) if block_id not in PLACES]
    assert all(pair.puller.memory.content(block_id) == [-1] * 4 for block_id in others)
    return len(landed)


def sizes(mover: str) -> tuple[int, int]:
    with met(mover) as (pair, relay):
        assert pull(pair, hangs_up=False) == 3
        return relay.num_up, relay.num_down


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flip, cut_at])
@pytest.mark.parametrize("mover", MOVERS)
def test_damage_anywhere_never_lands_a_wrong_block(
    mover: str, damage: object, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "penstock.transfer")
    num_up, num_down = sizes(mover)
    outcomes = []
    each = 40 if mover == "nixl" else 3  # its agents take a moment to make
    for place in range(0, num_down, each):
        with met(mover, down=damage(place)) as (pair, _):  # type: ignore[operator]
            outcomes.append(pull(pair))
    for place in range(0, num_up, 3 * each):
        with met(mover, up=damage(place)) as (pair, _):  # type: ignore[operator]
            outcomes.append(pull(pair))
    assert 0 in outcomes
    with met(mover, down=damage(2 * num_down)) as (pair, _):  # type: ignore[operator]
        assert pull(pair, hangs_up=False) == 3, "it comes too late"
