"""Drills on one replica whose KV cache has room for two whole contexts, and on the gateways in front of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from tools.drills import pressure, slow_provider
from tools.drills.stand import PATIENT, Process, Stand, stand

from tests.gateway.provider import providing

pytestmark = pytest.mark.slow


class Place(NamedTuple):
    stand: Stand
    under: pressure.UnderPressure
    gateway: Process


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with stand(tmp_path_factory.mktemp("pressure"), context=pressure.CONTEXT) as found:
        under = pressure.UnderPressure(found)
        yield Place(found, under, found.gateway(under.replica, **PATIENT))


def check(report: pressure.Report) -> None:
    """No crash, nothing wrong or left behind, and what cannot be is refused in so many words."""
    assert report.wrong == []
    assert report.num_restarts == 0
    assert report.refusals == ["400 context_length_exceeded"] * 4
    assert report.left == {}
    assert report.more_bytes < pressure.MAX_BYTES


@pytest.mark.parametrize(
    ("door", "count"),
    [
        ("replica", 5),
        ("gateway", 4),
        # A report that was written before a request came may be heard after it was sent: then one more is let in.
        pytest.param("gateway", 8, marks=pytest.mark.drill),
        *(pytest.param(door, 30, marks=pytest.mark.drill) for door in ("replica", "gateway")),
    ],
)
async def test_prompts_near_the_contexts_end_wait_for_room_and_harm_nobody(place: Place, door: str, count: int) -> None:
    asked = place.gateway if door == "gateway" else place.under.replica
    report = await pressure.drill(asked, place.under, pressure.long_ones(count))
    check(report)
    if door == "gateway":
        assert report.num_preempted == 0  # they wait at the door, and nobody is let in for whom others must leave
        assert len(report.shed) < report.num_streams
        assert set(report.shed) == ({"kv_tight"} if count > 4 else set())  # more than two caches' worth
        assert report.shed_chats == []  # the long ones go first
    else:
        assert report.fullest > 0.9
        assert report.shed == []


@pytest.mark.parametrize("count", [48, pytest.param(120, marks=pytest.mark.drill)])
async def test_decodes_that_fill_the_cache_are_preempted_and_come_out_right(place: Place, count: int) -> None:
    bodies, replica = pressure.decodes(count), place.under.replica
    report = await pressure.drill(replica, place.under, bodies, at_once=24, num_late=pressure.LATE)
    check(report)
    assert report.num_preempted > 0  # which nobody is before the last free block is taken
    assert set(report.turned_away) == {"429 overloaded with Retry-After"}


@pytest.mark.parametrize("count", [30, pytest.param(200, marks=pytest.mark.drill)])
async def test_nobody_waits_for_a_slow_provider_longer_than_its_time_limit(place: Place, count: int) -> None:
    with providing(says="from outside") as provider:
        gateway = slow_provider.chain(place.stand, place.under.replica, provider)
        report = await slow_provider.drill(gateway, provider, count)
    assert report.wrong == []  # all had their answers while the provider gave none
    assert report.num_given_up > 0
