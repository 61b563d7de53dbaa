import signal
import time
from typing import Any

import pytest

from penstock.tenancy import ledger as ledger_module
from penstock.tenancy.budgets import Budgets
from penstock.tenancy.ledger import Ledger
from penstock.tenancy.store import Store, open_store
from penstock.tenancy.usage import Usage
from tests.patience import eventually
from tests.tenancy.children import child, line_from


def used(number: int) -> Usage:
    return Usage(f"r{number}", "acme", "k", "m", time.time(), input_tokens=2, output_tokens=1)


def num_written(store: Store) -> int:
    return sum(one.requests for one in store.usage.sums("acme", since_s=0, until_s=time.time() + 3600, by="all"))


def test_closing_writes_what_is_left(store: Store) -> None:
    ledger = Ledger(store.usage, Budgets()).start()
    for number in range(100):
        ledger.record(used(number))
    ledger.close()
    assert num_written(store) == 100


def test_a_gateway_killed_at_any_moment_loses_no_usage_older_than_a_second(store: Store, store_url: str) -> None:
    with child("use", store_url, "a") as gateway:
        ended_s = [float(line_from(gateway))]
        while len(ended_s) < 50 or ended_s[-1] < ended_s[49] + 1.0:
            ended_s.append(float(line_from(gateway)))
        killed_s = time.time()
        gateway.send_signal(signal.SIGKILL)
        gateway.wait()
    owed = sum(at_s < killed_s - 1 for at_s in ended_s)
    assert owed > 20
    assert num_written(store) >= owed


@pytest.mark.slow
def test_usage_waits_for_a_store_that_is_gone_and_is_counted_once(postgres: Any, postgres_url: str) -> None:
    name = postgres_url.split("/")[-1].partition("?")[0]
    with open_store(postgres_url) as store, Ledger(store.usage, Budgets(), interval_s=0.02) as ledger:
        ledger.record(used(1))
        eventually(lambda: num_written(store) == 1)
        postgres.psql(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false;")
        postgres.psql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}';")
        for number in range(2, 50):
            ledger.record(used(number))
        time.sleep(0.2)
        postgres.psql(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true;")
        eventually(lambda: num_written(store) == 49)
        assert ledger.num_lost == 0


@pytest.mark.slow
def test_what_is_kept_for_a_store_that_is_gone_is_bounded(
    postgres: Any, postgres_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ledger_module, "MAX_PENDING", 10)
    name = postgres_url.split("/")[-1].partition("?")[0]
    with open_store(postgres_url) as store:
        postgres.psql(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false;")
        postgres.psql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}';")
        ledger = Ledger(store.usage, Budgets(), interval_s=60)
        for number in range(25):
            ledger.record(used(number))
        ledger._try_flush()
        assert ledger.num_lost == 15
        assert "15 requests is lost" in caplog.text
        postgres.psql(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true;")
        ledger.flush()
        assert num_written(store) == 10
