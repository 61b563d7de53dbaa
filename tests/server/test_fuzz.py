"""A replica under attack: it is reached by gateways, and on a laptop by everybody."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from tools.drills.fuzz import fuzz

from penstock.server.app import Replica as ReplicaApp
from penstock.server.recorder import Recorder
from tests.attacked import bounded
from tests.server.replica import NAME, Replica, serving
from tests.waiting import eventually


@pytest.fixture(scope="module")
def attacked() -> Iterator[tuple[Replica, asyncio.AbstractEventLoop]]:
    """A replica and the event loop of its server."""
    loops: list[asyncio.AbstractEventLoop] = []

    def mount(app: ReplicaApp, recorder: Recorder) -> ReplicaApp:
        loops.append(asyncio.get_running_loop())
        return app

    with serving(mount=mount) as found:
        yield found, loops[0]


@pytest.mark.parametrize(
    ("seed", "count"),
    [
        (3, 600),
        pytest.param(4, 3000, marks=pytest.mark.slow),
        pytest.param(5, 10_000, marks=[pytest.mark.slow, pytest.mark.drill]),
    ],
    ids=["some", "many", "drill"],
)
def test_what_no_client_should_send_is_refused_and_leaves_nothing_behind(
    attacked: tuple[Replica, asyncio.AbstractEventLoop], caplog: pytest.LogCaptureFixture, seed: int, count: int
) -> None:
    replica, loop = attacked
    with bounded(loop):
        found = fuzz(replica.host, replica.port, NAME, seed=seed, count=count)
    assert found.faults == []
    # Some of the requests are good; how many of those a busy machine turns away is its own affair.
    assert found.statuses[200] > 0
    assert found.statuses[200] + found.statuses[429] + found.statuses[529] > count // 20
    assert [record for record in caplog.records if record.exc_info] == []
    eventually(replica.is_idle)
    answer = replica.openai.completions.create(model=NAME, prompt="the fox", max_tokens=5, temperature=0)
    assert answer.choices[0].text == replica.answer("the fox", 5)
