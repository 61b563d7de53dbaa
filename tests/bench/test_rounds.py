from __future__ import annotations

import sys

import pytest

from penstock.bench.rounds import run_rounds
from penstock.bench.servers import attach, started
from penstock.bench.workloads import Workload
from penstock.core.errors import ConfigError, EngineFailed

FAKE = [sys.executable, "-m", "tests.bench.fake_server"]
TINY = Workload("tiny", prompt_tokens=3, output_tokens=4, concurrency=2, num_requests=2)
WORDS = [" these", " are", " words"]


@pytest.mark.slow
def test_servers_take_turns_and_each_is_measured_in_every_round() -> None:
    with started("ours", FAKE) as ours, started("other", FAKE) as other:
        peer = attach("peer", f"{other.url}/v1")
        measurements = list(run_rounds([ours, peer], [TINY], WORDS, num_rounds=2, seed="1"))
    assert [(one.round, one.server) for one in measurements] == [(0, "ours"), (0, "peer"), (1, "peer"), (1, "ours")]
    assert all((one.num_answers, one.output_tokens, one.failures) == (2, 8, []) for one in measurements)
    assert (peer.model, peer.ready_s) == ("fake", None)
    assert ours.ready_s is not None


def test_a_server_that_ends_before_it_is_ready_is_an_error() -> None:
    with pytest.raises(EngineFailed, match="status 3"), started("ours", [sys.executable, "-c", "exit(3)"]):
        pass


def test_a_peer_that_does_not_answer_is_an_error_before_anything_is_measured() -> None:
    with pytest.raises(ConfigError, match="no OpenAI-compatible server answers"):
        attach("peer", "http://127.0.0.1:9")
