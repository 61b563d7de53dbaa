"""A rank dies or hangs under a stream, on a real server: the client is told which one, and all ranks start anew."""

from __future__ import annotations

import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest

from penstock.api import replica_report
from penstock.core.measurements import DeviceReadings
from tests.cli.real_server import RealServer, tiny_server, write_tiny_model
from tests.template import ENGINE, RANK, started_by
from tests.waiting import eventually

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    path.mkdir()
    write_tiny_model(path)
    return path


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RealServer]:
    with tiny_server(model, "--tp", "2", "--rank-timeout", "10", "--threads", "1") as found:
        yield found


def follower(server: RealServer) -> psutil.Process:
    (found,) = eventually(lambda: started_by(server.engine_process().pid, RANK), lambda found: len(found) == 1)
    return found


def answer(server: RealServer) -> str:
    asked = {"model": server.model, "prompt": "the quick brown fox", "max_tokens": 12, "temperature": 0}
    return server.openai.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0].text  # type: ignore[call-overload, no-any-return]


def stream(server: RealServer) -> Iterator[object]:
    asked = {"model": server.model, "prompt": "on and on", "max_tokens": 60_000, "stream": True}
    chunks = iter(server.openai.completions.create(**asked, extra_body={"ignore_eos": True}))  # type: ignore[call-overload]
    next(chunks)
    return chunks


def has_restarted(server: RealServer, engine: psutil.Process) -> None:
    """Another engine than this one answers."""
    eventually(
        lambda: [each.pid for each in started_by(server.process.pid, ENGINE)],
        lambda found: len(found) == 1 and found != [engine.pid],
    )
    eventually(lambda: server.status("/ready"), lambda status: status == 200)


def lose(server: RealServer, number: signal.Signals, words: str) -> None:
    """What a client is told, and that nothing is left of it."""
    expected = answer(server)
    lost, engine = follower(server), server.engine_process()
    chunks = stream(server)
    lost.send_signal(number)
    with pytest.raises(openai.APIError, match=f"rank 1 of the model is lost: {words}"):
        list(chunks)
    has_restarted(server, engine)
    assert not lost.is_running() or lost.status() == psutil.STATUS_ZOMBIE, "a rank outlived its group"
    assert answer(server) == expected


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGKILL, "its process was killed by SIGKILL"), (signal.SIGSTOP, "it")],
    ids=["killed", "stopped"],
)
def test_a_stream_is_told_which_rank_was_lost_and_the_group_starts_anew(
    server: RealServer, number: signal.Signals, words: str
) -> None:
    lose(server, number, words)


def test_a_pipeline_that_loses_a_stage_starts_anew(model: Path) -> None:
    """Its processes are executed, and not forked as those of the other server."""
    with tiny_server(model, "--pp", "2", "--rank-timeout", "10", "--threads", "1", forks=False) as server:
        lose(server, signal.SIGKILL, "its process was killed by SIGKILL")
        lose_engine(server)


def told(server: RealServer) -> DeviceReadings:
    """What a gateway and the console are told of the ranks."""
    answer(server)
    with urllib.request.urlopen(f"{server.url}/v1/penstock/snapshot") as answered:
        return replica_report.decode(answered.read()).measured.device


def test_every_rank_says_how_it_stands(server: RealServer) -> None:
    """On a CPU with the time that it spends in sums with the others, which is a part of its steps' time."""
    answer(server)

    def readings() -> dict[tuple[str, str], float]:
        answer(server)  # shares are those of steps between two readings
        return {
            (sample.name, sample.labels["rank"]): sample.value
            for family in server._families()
            for sample in family.samples
            if sample.name.startswith("penstock_rank_") and sample.value > 0
        }

    spent, busy = "penstock_rank_communication_seconds_total", "penstock_rank_busy_seconds_total"
    wanted = {(name, rank) for name in ("penstock_rank_memory_bytes", spent, busy) for rank in ("0", "1")}
    found = eventually(readings, lambda found: found.keys() == wanted)
    assert all(found[spent, rank] < found[busy, rank] for rank in ("0", "1"))
    report = eventually(lambda: told(server), lambda told: any(one.communication for one in told.ranks))
    assert (report.parallelism, [one.rank for one in report.ranks]) == ("TP2", [0, 1])
    assert all(one.memory_bytes > 0 and not one.is_estimated for one in report.ranks)


def test_ranks_end_with_their_engine(server: RealServer) -> None:
    lose_engine(server)


def lose_engine(server: RealServer) -> None:
    lost, engine = follower(server), server.engine_process()
    engine.kill()
    eventually(lambda: lost.is_running() and lost.status() != psutil.STATUS_ZOMBIE, lambda runs: not runs)
    has_restarted(server, engine)
    assert answer(server)


def test_a_rank_that_dies_while_nothing_runs_is_missed_at_once(server: RealServer) -> None:
    engine = server.engine_process()
    follower(server).kill()
    has_restarted(server, engine)
