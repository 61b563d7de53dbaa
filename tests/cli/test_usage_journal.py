"""A real gateway is killed with `kill -9` in mid-traffic: no usage is lost but what is in flight."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from penstock.tenancy.store import open_store
from tests.cli.real_gateway import RealGateway, real_gateway
from tests.server.replica import serving

pytestmark = pytest.mark.slow

NUM_REQUESTS = 30
BODY = {"model": "small", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


class Killed(Exception):
    pass


def num_written(store: str) -> int:
    with open_store(store) as found:
        sums = found.usage.sums("anonymous", since_s=0, until_s=time.time() + 3600, by="all")
    return sum(one.requests for one in sums)


def ask(gateway: RealGateway) -> None:
    assert gateway.ask("POST", "/v1/chat/completions", BODY)[0] == 200


def test_a_gateway_killed_in_mid_traffic_loses_only_what_is_in_flight(tmp_path: Path) -> None:
    with serving() as replica:
        with contextlib.suppress(Killed), real_gateway(tmp_path, replica, level="warning") as gateway:
            for _ in range(NUM_REQUESTS):
                ask(gateway)
            gateway.process.kill()
            gateway.process.wait()
            raise Killed
        with real_gateway(tmp_path, replica, level="warning") as gateway:
            # One at a time: at most the last one, whose answer was there before the gateway had got round to its books.
            assert NUM_REQUESTS - 1 <= num_written(gateway.store) <= NUM_REQUESTS
            before = num_written(gateway.store)
            ask(gateway)
        assert num_written(gateway.store) == before + 1
