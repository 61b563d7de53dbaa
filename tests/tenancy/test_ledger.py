import signal
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from penstock.tenancy import ledger as ledger_module
from penstock.tenancy.budgets import Budgets
from penstock.tenancy.journal import Journal
from penstock.tenancy.ledger import Ledger
from penstock.tenancy.store import Store, open_store
from penstock.tenancy.usage import Usage
from tests.tenancy.children import child, line_from
from tests.waiting import GIVE_UP_S, eventually


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
        ledger.tick()
        assert ledger.num_lost == 15
        assert "15 requests is lost" in caplog.text
        open_database(postgres, postgres_url)
        ledger.flush()
        assert num_written(store) == 10


HUGE = 10**30  # no store can hold it


@pytest.mark.parametrize("num_others", [0, 1, 9])
def test_a_record_that_the_store_cannot_hold_is_set_aside_and_the_others_are_written(
    store: Store, num_others: int, caplog: pytest.LogCaptureFixture
) -> None:
    with Ledger(store.usage, Budgets(), interval_s=GIVE_UP_S) as ledger:  # ticks are the test's own
        for number in range(num_others):
            ledger.record(used(number))
        ledger.record(Usage("poison", "mallory", "k", "m", time.time(), output_tokens=HUGE))
        ledger.record(Usage("another", "mallory", "k", "\ud800", time.time()))  # nor can it be put into UTF-8
        for number in range(num_others):
            ledger.record(used(100 + number))
        ledger.tick()
        assert ledger.lost() == {"store_gone": 0, "set_aside": 2}
        ledger.record(used(999))  # and it goes on
    assert num_written(store) == 2 * num_others + 1
    assert "'poison' of tenant 'mallory'" in caplog.text


def test_a_writing_thread_outlives_an_error_that_nobody_expected(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: float) -> None:
        monkeypatch.undo()
        raise RuntimeError("not of the store's kinds")

    with Ledger(store.usage, Budgets(), interval_s=0.01) as ledger:
        monkeypatch.setattr(store.usage, "forget_settled", fail)
        ledger._forget_at_s = 0.0
        eventually(lambda: store.usage.forget_settled != fail)
        ledger.record(used(1))
        eventually(lambda: ledger.num_written, lambda written: written == 1)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["recorded", "written"])
def test_a_gateway_killed_at_any_moment_loses_no_usage_and_none_is_written_twice(
    store: Store, store_url: str, tmp_path: Path, point: str
) -> None:
    """It is killed when nothing is in the store yet, or when all is and its journal does not know so."""
    with child("journal", store_url, str(tmp_path / "journal"), point, "25") as gateway:
        assert line_from(gateway) == point
        assert num_written(store) == (0 if point == "recorded" else 25)
        gateway.send_signal(signal.SIGKILL)
        gateway.wait()
    journal = Journal(tmp_path / "journal")
    with Ledger(store.usage, Budgets(), journal):
        assert num_written(store) == 25
    assert all(path.stat().st_size == 0 for path in (tmp_path / "journal").iterdir())


@pytest.mark.slow
def test_gateways_of_one_host_have_journals_of_their_own_and_the_next_one_takes_what_dead_ones_left(
    store: Store, store_url: str, tmp_path: Path
) -> None:
    directory = tmp_path / "journal"
    with (
        child("journal", store_url, str(directory), "recorded", "10", "a") as first,
        child("journal", store_url, str(directory), "recorded", "20", "b") as second,
    ):
        assert [line_from(first), line_from(second)] == ["recorded"] * 2
        with Ledger(store.usage, Budgets(), Journal(directory)):
            assert num_written(store) == 0  # they live
        for process in (first, second):
            process.send_signal(signal.SIGKILL)
            process.wait()
    with Ledger(store.usage, Budgets(), Journal(directory)):
        assert num_written(store) == 30


@pytest.mark.slow
def test_recovered_usage_counts_in_budgets(store: Store, store_url: str, tmp_path: Path) -> None:
    with child("journal", store_url, str(tmp_path / "journal"), "recorded", "5") as gateway:
        assert line_from(gateway) == "recorded"
        gateway.send_signal(signal.SIGKILL)
        gateway.wait()
    budgets = Budgets()
    with Ledger(store.usage, budgets, Journal(tmp_path / "journal"), interval_s=GIVE_UP_S) as ledger:
        month = time.strftime("%Y-%m", time.gmtime())
        assert budgets.spent("acme", month).tokens == 5 * 7
        ledger.record(used(1))
        ledger.tick()
        assert budgets.spent("acme", month).tokens == 5 * 7 + 3


def test_a_journal_is_emptied_when_the_store_has_what_it_holds_and_not_before(store: Store, tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    ledger = Ledger(store.usage, Budgets(), journal, interval_s=60).start()
    for turn in range(4):
        for number in range(10):
            ledger.record(used(10 * turn + number))
        assert {usage.request_id for usage in journal.left_behind()} >= {f"r{10 * turn + n}" for n in range(10)}
        ledger.tick()
        assert journal.left_behind() == []
    ledger.close()
    assert num_written(store) == 40


def test_a_journal_is_bounded_and_what_it_has_no_room_for_is_written_all_the_same(store: Store, tmp_path: Path) -> None:
    journal = Journal(tmp_path, max_file_bytes=1000)
    with Ledger(store.usage, Budgets(), journal, interval_s=60) as ledger:
        for number in range(100):
            ledger.record(used(number))
        assert journal.num_left_out > 90
        assert sum(path.stat().st_size for path in tmp_path.glob("*.jsonl")) <= 2000
    assert num_written(store) == 100


def test_a_record_that_was_torn_spoils_no_other_and_one_that_is_too_old_is_not_charged(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path)
    journal.open()
    journal.append(used(1))
    journal.append(
        Usage("old", "acme", "k", "m", time.time() - 3 * 86400)
    )  # the store may have it, and no longer knows
    journal.close()
    with (tmp_path / "1.a.jsonl").open("ab") as file:
        file.write(b'\n{"request_id":"r2","tena')
    with Ledger(store.usage, Budgets(), Journal(tmp_path)) as ledger:
        ledger.record(used(3))
        assert ledger.lost()["store_gone"] == 1
    assert num_written(store) == 2
    assert "1 records that cannot be read" in caplog.text
