"""A rank dies or hangs under load, in one of two replicas behind a real gateway: no client sees a gap.

Both replicas have two ranks, so that their answers have the same bits: a stream must say what it says on a quiet day.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tools.drills import survival
from tools.drills.call import Call
from tools.drills.stand import PATIENT, Process, Stand, stand

from tests.sdk import Unverified
from tests.template import ENGINE, RANK, engine_of, started_by
from tests.waiting import eventually

pytestmark = pytest.mark.slow

CONTEXT = 1 << 16
STREAMS = 6
RANKS = ("--tp", "2", "--rank-timeout", "10")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    with stand(tmp_path_factory.mktemp("ranks"), context=CONTEXT) as found:
        yield found


@pytest.fixture(scope="module")
def replicas(place: Stand) -> list[Process]:
    return [place.replica(*RANKS) for _ in range(2)]


@pytest.fixture(scope="module")
def gateway(place: Stand, replicas: list[Process]) -> Process:
    """It takes no replica for hung by itself: what it learns of a rank, the replica has told it."""
    return place.gateway(*replicas, **PATIENT)


def num_ready(gateway: Process) -> int:
    return sum(one["state"] == "ready" for one in gateway.get("/admin/v1/replicas")["replicas"])


def num_carried_on(gateway: Process) -> float:
    text = Unverified().get(f"{gateway.url}/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return sum(one.value for one in samples if one.name == "penstock_gateway_streams_carried_on_total")


def rank_of(replica: Process) -> psutil.Process:
    (found,) = started_by(engine_of(replica.pid).pid, RANK)
    return found


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_streams_go_on_elsewhere_when_a_rank_is_lost(
    gateway: Process, replicas: list[Process], how: signal.Signals
) -> None:
    tokens = 400
    while not await are_carried_on(gateway, replicas, how, tokens):
        tokens *= 2  # they had ended before it happened
        assert tokens < CONTEXT


async def are_carried_on(gateway: Process, replicas: list[Process], how: signal.Signals, tokens: int) -> bool:
    """Whether a stream was left to be carried on when the rank was lost. Every one must be as on a quiet day."""
    await asyncio.to_thread(eventually, lambda: num_ready(gateway), lambda count: count == len(replicas))
    expected = await survival.undisturbed(gateway.port, STREAMS, tokens)
    before = num_carried_on(gateway)
    hurt: list[tuple[Process, psutil.Process, psutil.Process]] = []

    async def lose_a_rank(calls: list[Call]) -> list[int]:
        await survival.all_at(calls, 12)
        victim = max(replicas, key=Process.num_open)
        hurt.append((victim, engine_of(victim.pid), rank_of(victim)))
        hurt[0][2].send_signal(how)
        return []

    report = await survival.drill(gateway.port, expected, tokens, lose_a_rank)
    assert report.wrong == []
    [(victim, engine, lost)] = hurt
    await asyncio.to_thread(has_restarted, victim, engine)
    assert "rank 1 of the model is lost" in victim.log.read_text()
    assert not lost.is_running() or lost.status() == psutil.STATUS_ZOMBIE, "a rank outlived its group"
    return num_carried_on(gateway) > before


def has_restarted(replica: Process, engine: psutil.Process) -> None:
    """All its ranks as one: another engine than this one answers."""
    eventually(
        lambda: [each.pid for each in started_by(replica.pid, ENGINE)],
        lambda found: len(found) == 1 and found != [engine.pid],
    )
    eventually(replica.is_ready)
