import signal
import time
from typing import Any
from urllib.parse import urlsplit

import pytest

from penstock.tenancy import ledger as ledger_module
from penstock.tenancy.budgets import Budgets
from penstock.tenancy.ledger import Ledger
from penstock.tenancy.store import Store, open_store
from penstock.tenancy.usage import Usage
from tests.tenancy.children import child, line_from
from tests.waiting import eventually


def used(number: int) -> Usage:
    return Usage(f"r{number}", "acme", "k", "m", time.time(), input_tokens=2, output_tokens=1)


def num_written(store: Store) -> int:
    return sum(one.requests for one in store.usage.sums("acme", since_s=0, until_s=time.time() + 3600, by="all"))


def close_database(postgres: Any, url: str) -> None:
    """Nobody can connect, and who was connected is not."""
    name = urlsplit(url).path.removeprefix("/")
    postgres.psql(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false;")
    postgres.psql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}';")


def open_database(postgres: Any, url: str) -> None:
    postgres.psql(f"ALTER DATABASE {urlsplit(url).path.removeprefix('/')} ALLOW_CONNECTIONS true;")


def test_closing_writes_what_is_left(store: Store) -> None:
    ledger = Ledger(store.usage, Budgets()).start()
    for number in range(100):
        ledger.record(used(number))
    ledger.close()
    assert num_written(store) == 100


def test_a_gateway_killed_at_any_moment_loses_nothing_that_it_has_written(store: Store, store_url: str) -> None:
    with child("use", store_url, "a") as gateway:
        while (owed := int(line_from(gateway))) < 100:
            pass
        gateway.send_signal(signal.SIGKILL)
        gateway.wait()
    assert num_written(store) >= owed


def test_all_that_was_used_before_is_written_each_half_second(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so no usage older than a second is lost with its gateway."""
    ledger = Ledger(store.usage, Budgets())
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        """As long as a gateway runs, which here is three turns; in each of them ten requests end."""
        assert num_written(store) == ledger.num_written == 10 * len(waits)
        waits.append(seconds)
        for number in range(10):
            ledger.record(used(10 * len(waits) + number))
        return len(waits) > 3

    monkeypatch.setattr(ledger._stopping, "wait", wait)
    ledger._run()
    assert waits == [0.5] * 4


@pytest.mark.slow
def test_usage_waits_for_a_store_that_is_gone_and_is_counted_once(
    postgres: Any, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(postgres_url) as store, Ledger(store.usage, Budgets(), interval_s=0.02) as ledger:
        ledger.record(used(1))
        eventually(lambda: num_written(store), lambda written: written == 1)
        close_database(postgres, postgres_url)
        for number in range(2, 50):
            ledger.record(used(number))
        eventually(lambda: "waits for the store" in caplog.text)
        open_database(postgres, postgres_url)
        eventually(lambda: num_written(store), lambda written: written == 49)
        assert ledger.num_lost == 0


@pytest.mark.slow
def test_what_is_kept_for_a_store_that_is_gone_is_bounded(
    postgres: Any, postgres_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ledger_module, "MAX_PENDING", 10)
    with open_store(postgres_url) as store:
        close_database(postgres, postgres_url)
        ledger = Ledger(store.usage, Budgets(), interval_s=60)
        for number in range(25):
            ledger.record(used(number))
        ledger._try_flush()
        assert ledger.num_lost == 15
        assert "15 requests is lost" in caplog.text
        open_database(postgres, postgres_url)
        ledger.flush()
        assert num_written(store) == 10
