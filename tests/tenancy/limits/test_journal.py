"""The journal of a host: what it holds is what the limiter admitted, whatever happened to the file."""

import errno
import os
from pathlib import Path

import pytest

from penstock.observe import background
from penstock.tenancy.limits import journal
from penstock.tenancy.limits.journal import SlotJournal
from penstock.tenancy.limits.limiter import LocalLimiter
from penstock.tenancy.limits.quota import US, Quota, Rate
from penstock.tenancy.limits.tenant_limits import Reservation
from tests.virtual_time import SteppedClock

QUOTA = Quota(Rate(100), Rate(1000))


def amounts(slots: SlotJournal, clock: SteppedClock) -> dict[str, list[list[int]]]:
    return {tenant: [slot.amounts for slot in found] for tenant, found in slots.load(int(clock() * US)).items()}


def spend(limiter: LocalLimiter, tenant: str, reserved: int, used: int) -> None:
    held = limiter.reserve(tenant, QUOTA, reserved)
    assert isinstance(held, Reservation)
    limiter.settle(held, used)


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


def test_what_was_admitted_and_settled_is_read_back_for_a_minute(tmp_path: Path, clock: SteppedClock) -> None:
    path = tmp_path / "journal"
    limiter = LocalLimiter(clock, note=SlotJournal(path).note)
    spend(limiter, "acme", 100, 40)
    spend(limiter, "acme", 10, 10)
    clock.advance(1)
    spend(limiter, "acme", 7, 7)
    spend(limiter, "zeta", 1, 0)
    assert amounts(SlotJournal(path), clock) == {"acme": [[2, 50], [1, 7]], "zeta": [[1, 0]]}
    clock.advance(59)
    assert amounts(SlotJournal(path), clock) == {"acme": [[1, 7]], "zeta": [[1, 0]]}
    clock.now_s = 5.0  # the host was started again, and its clock with it
    assert amounts(SlotJournal(path), clock) == {}


def test_a_torn_line_is_passed_over(tmp_path: Path, clock: SteppedClock) -> None:
    path = tmp_path / "journal"
    limiter = LocalLimiter(clock, note=SlotJournal(path).note)
    spend(limiter, "acme", 100, 40)
    with path.open("ab") as file:
        file.write(b'["acme",10000')
    assert amounts(SlotJournal(path), clock) == {"acme": [[1, 40]]}


def test_a_long_journal_is_written_anew_and_says_the_same(
    tmp_path: Path, clock: SteppedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MAX_BYTES", 1000)
    path = tmp_path / "journal"
    slots = SlotJournal(path)
    limiter = LocalLimiter(clock, note=slots.note)
    for _ in range(50):
        spend(limiter, "acme", 5, 3)
    before, size = amounts(SlotJournal(path), clock), path.stat().st_size
    slots.trim(limiter.slots())
    assert path.stat().st_size < size / 10
    assert path.stat().st_mode & 0o077 == 0
    assert amounts(SlotJournal(path), clock) == before
    spend(limiter, "acme", 5, 3)
    assert amounts(SlotJournal(path), clock) == {"acme": [[51, 153]]}


def test_a_full_disk_costs_no_request(tmp_path: Path, clock: SteppedClock, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "write", full)
    before = background.errors().get("limiter", 0)
    spend(LocalLimiter(clock, note=SlotJournal(tmp_path / "journal").note), "acme", 5, 3)
    assert background.errors()["limiter"] > before
