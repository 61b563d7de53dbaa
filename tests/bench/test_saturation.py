from __future__ import annotations

from random import Random

import pytest

from penstock.bench import serve
from penstock.bench.board import Board
from penstock.bench.lag import GeneratorHealth
from penstock.bench.load import Result, Run
from penstock.bench.objective import Objective
from penstock.bench.page import page
from penstock.bench.point import Point, make_point
from penstock.bench.saturation import bench_saturation, gains, keeps_up
from penstock.bench.serve import Asked, LoadShape, Target
from penstock.bench.serve_text import as_text
from penstock.core.errors import ConfigError
from penstock.workload.arrivals import arrival_times
from penstock.workload.lengths import Lengths
from tests.bench.fake_server import FakeServer, MemoryClient, serving
from tests.virtual_time import in_virtual_time


def queued(rate: float, capacity: float, seconds: float = 60.0, seed: int = 0) -> Point:
    """What a server with one slot does under Poisson arrivals."""
    free_s, results = 0.0, []
    for at_s in arrival_times("poisson", rate, Random(seed)):
        if at_s > seconds:
            break
        free_s = max(free_s, at_s) + 1 / capacity
        results.append(Result(0, 0, at_s, at_s, free_s, 1, first_s=free_s, last_s=free_s, output_tokens=1))
    return make_point("", rate, Run(free_s, seconds, results, GeneratorHealth(0, None, None), len(results)), None)


@pytest.mark.parametrize("seed", range(5))
def test_a_queue_that_grows_is_a_server_that_does_not_keep_up(seed: int) -> None:
    assert keeps_up(queued(8.0, capacity=10.0, seed=seed))
    assert not keeps_up(queued(14.0, capacity=10.0, seed=seed))


def test_a_server_that_sheds_load_does_not_keep_up_with_it() -> None:
    point = queued(8.0, capacity=10.0)
    refusing = point.__class__(**{**point.__dict__, "errors": {"http_429": point.num_requests // 4}})
    assert not keeps_up(refusing)


def test_more_clients_must_bring_more() -> None:
    few, more = queued(4.0, capacity=10.0), queued(9.0, capacity=10.0)
    assert gains(more, [few])
    assert not gains(queued(40.0, capacity=10.0), [few, queued(20.0, capacity=10.0)])


@in_virtual_time
async def test_a_server_of_two_slots_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two answers at a time, each of 100 ms: 20 requests a second, and no more."""
    fake = FakeServer(token_s=0.05, slots=2)
    monkeypatch.setattr(serve, "Client", lambda url, **_: MemoryClient(fake))
    report = await bench_saturation(
        Target("http://127.0.0.1:1"),
        Asked(prompt=Lengths("fixed", 5), output=Lengths("fixed", 2)),
        by="rate",
        goal=0.9,
        start=4.0,
        precision=0.25,
        seconds=5,
        shape=LoadShape(process="constant"),
        objective=Objective(ttft=0.3),
        seed="1",
        command="",
        board=Board(),
    )
    assert report.slo_load is not None
    assert report.saturation_load is not None
    assert 16 <= report.slo_load <= 20.5
    assert 16 <= report.saturation_load <= 20.5
    assert report.peak_requests_per_s == pytest.approx(20, rel=0.1)
    assert [point.load for point in report.points] == sorted(point.load for point in report.points)
    assert "TTFT ≤ 300 ms is kept for 90% of the requests up to" in as_text(report)
    assert "keeps the SLO" in page(report)


async def test_a_server_that_answers_nobody_is_told_at_once() -> None:
    async with serving(FakeServer(refuse_every=1, status=400)) as fake:
        with pytest.raises(ConfigError, match=r"does not answer a first question: http_400.*busy"):
            await bench_saturation(
                Target(fake.url),
                Asked(),
                by="rate",
                goal=0.9,
                start=None,
                precision=0.5,
                seconds=1,
                shape=LoadShape(),
                objective=Objective(ttft=1),
                seed="1",
                command="",
                board=Board(),
            )
