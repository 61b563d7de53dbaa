"""Files, batches and their rows in real stores."""

from __future__ import annotations

import pytest

from penstock.core.errors import Conflict, FileNotFound, LeaseLost, StorageQuotaExceeded
from penstock.tenancy.batches import ERRORS, OUTPUT, BatchFacts, BatchLimits, DoneRow, Lease, RowError, StoredBatch
from penstock.tenancy.files import ABANDONED_S, Chunk, FileLimits, StoredFile
from penstock.tenancy.store import Store
from penstock.tenancy.usage import Usage

LIMITS, FILES = BatchLimits(10), FileLimits(1000, 5)
FACTS = BatchFacts("/v1/chat/completions", "24h", "key", keep_s=100.0)


@pytest.fixture
def now_s() -> list[float]:
    return [1e9]


@pytest.fixture
def store(store: Store, now_s: list[float]) -> Store:
    return Store(store._database, clock=lambda: now_s[0])


def add_file(store: Store, tenant: str = "acme", file_id: str = "file-1", num_bytes: int = 10) -> StoredFile:
    store.files.begin(tenant, file_id, FILES)
    store.files.add_chunk(tenant, file_id, Chunk(f"{file_id}/0", num_bytes), FILES)
    return store.files.finish(tenant, file_id, purpose="batch", filename="rows.jsonl", ttl_s=1000.0)


def add_batch(store: Store, name: str = "1") -> StoredBatch:
    if store.files.find("acme", "file-1") is None:
        add_file(store)
    return store.batches.add(
        "acme", f"batch_{name}", "openai", FACTS, input_file_id="file-1", window_s=500.0, limits=LIMITS
    )


def claimed(store: Store, owner: str = "one") -> Lease:
    batch = store.batches.claim(owner, 30.0)
    assert batch is not None
    return Lease(batch.tenant_id, batch.id, owner, batch.epoch)


def begun(store: Store, num_rows: int = 4) -> Lease:
    add_batch(store)
    lease = claimed(store)
    store.batches.begin(lease, num_rows=num_rows, limits=LIMITS, has_error_file=True)
    return lease


def row(line: int, outcome: str = "completed", result: bytes = b"{}\n") -> DoneRow:
    usage = Usage(f"batch_1/{line}", "acme", "key", "small", 1e9, 10, 0, 5, 7)
    return DoneRow(line, outcome, OUTPUT if outcome == "completed" else ERRORS, result, usage)


def billed(store: Store) -> tuple[int, int]:
    """Requests and what they cost."""
    sums = store.usage.sums("acme", since_s=0, until_s=1e12, by="all")
    return sum(one.requests for one in sums), sum(one.cost_nanos for one in sums)


def test_a_batch_has_one_owner_until_its_lease_runs_out(store: Store, now_s: list[float]) -> None:
    add_batch(store)
    lease = claimed(store)
    assert store.batches.claim("two", 30.0) is None
    now_s[0] += 29.0
    assert store.batches.renew("one", ["batch_1"], 30.0) == {"batch_1": "validating"}
    now_s[0] += 29.0
    assert store.batches.claim("two", 30.0) is None
    now_s[0] += 1.0
    later = claimed(store, "two")
    assert later.epoch == lease.epoch + 1
    assert store.batches.renew("one", ["batch_1"], 30.0) == {}
    for write in (
        lambda: store.batches.commit(lease, [row(1)]),
        lambda: store.batches.begin(lease, num_rows=1, limits=LIMITS, has_error_file=False),
        lambda: store.batches.finalize(lease),
        lambda: store.batches.end(lease, "completed"),
    ):
        with pytest.raises(LeaseLost):
            write()
    assert billed(store) == (0, 0)
    store.batches.release("two")
    assert claimed(store, "one").epoch == later.epoch + 1


def test_a_batch_that_could_not_be_gone_on_with_is_tried_again_after_a_pause(store: Store, now_s: list[float]) -> None:
    add_batch(store)
    store.batches.give_back(claimed(store), 20.0)
    assert store.batches.claim("one", 30.0) is None
    now_s[0] += 20.0
    assert claimed(store).epoch == 2


def test_tenants_with_enough_of_them_are_passed_over(store: Store) -> None:
    add_batch(store)
    assert store.batches.claim("one", 30.0, busy=["acme"]) is None


def test_a_row_and_its_bill_are_written_together_and_once(store: Store, now_s: list[float]) -> None:
    first = begun(store)
    store.batches.commit(first, [row(1), row(2, "failed")])
    store.batches.commit(first, [row(1), row(3)])  # nobody knew whether it was written
    now_s[0] += 30.0
    second = claimed(store, "two")
    found = store.batches.commit(second, [row(3), row(4)])  # the other gateway had answered the third, too
    assert (found.completed, found.failed, found.num_done) == (3, 1, 4)
    assert billed(store) == (4, 28)
    assert store.batches.done_lines("batch_1") == {1, 2, 3, 4}


def test_results_wait_in_the_store_until_they_are_in_a_file(store: Store, now_s: list[float]) -> None:
    lease = begun(store)
    store.batches.commit(lease, [row(1, result=b"first\n"), row(3, result=b"third\n"), row(4, "failed", b"bad\n")])
    assert store.batches.next_spill(lease, 100, 1000) is None
    spill = store.batches.next_spill(lease, 12, 1000)
    assert spill is not None
    assert (spill.number, spill.lines, spill.data) == (0, [1, 3], b"first\nthird\n")
    now_s[0] += 30.0  # its owner is killed before it has noted the object
    later = claimed(store, "two")
    with pytest.raises(LeaseLost):
        store.batches.spilled(lease, spill, Chunk("lost", 12))
    store.batches.commit(later, [row(2, result=b"second\n")])
    spill = store.batches.next_spill(later, 13, 13)
    assert spill is not None
    assert spill.lines == [1, 2]
    store.batches.spilled(later, spill, Chunk("a", 13))
    while (spill := store.batches.next_spill(later, 1, 100)) is not None:
        store.batches.spilled(later, spill, Chunk(f"{spill.lines[0]}", len(spill.data)))
    store.batches.finalize(later)
    batch = store.batches.end(later, "completed")
    output = store.files.find("acme", batch.facts.output_file_id)
    errors = store.files.find("acme", batch.facts.error_file_id)
    assert output is not None
    assert errors is not None
    assert (output.chunks, output.num_bytes) == ([Chunk("a", 13), Chunk("3", 6)], 19)
    assert errors.chunks == [Chunk("4", 4)]
    assert store.batches.done_lines("batch_1") == set()


def test_a_batch_ends_without_files_that_have_nothing_in_them(store: Store) -> None:
    lease = begun(store)
    batch = store.batches.end(lease, "failed", [RowError("file_lost", "gone")])
    assert (batch.facts.output_file_id, batch.facts.error_file_id) == ("", "")
    assert batch.facts.errors == (RowError("file_lost", "gone"),)
    assert store.batches.claim("one", 30.0) is None


def test_only_a_batch_that_is_not_finished_can_be_cancelled(store: Store) -> None:
    lease = begun(store)
    found = store.batches.cancel("acme", "batch_1", "openai")
    assert found is not None
    assert found.status == "cancelling"
    assert store.batches.cancel("acme", "batch_1", "openai") == found
    assert store.batches.renew("one", ["batch_1"], 30.0) == {"batch_1": "cancelling"}
    store.batches.end(lease, "cancelled")
    with pytest.raises(Conflict):
        store.batches.cancel("acme", "batch_1", "openai")
    assert store.batches.cancel("other", "batch_1", "openai") is None
    assert store.batches.cancel("acme", "batch_1", "anthropic") is None


def test_rows_under_way_are_bounded_for_each_tenant(store: Store) -> None:
    lease = begun(store, num_rows=9)
    add_batch(store, "2")
    other = claimed(store, "two")
    with pytest.raises(StorageQuotaExceeded):
        add_batch(store, "3")
    with pytest.raises(StorageQuotaExceeded):
        store.batches.begin(other, num_rows=2, limits=LIMITS, has_error_file=True)
    store.batches.end(lease, "completed")
    store.batches.begin(other, num_rows=2, limits=LIMITS, has_error_file=True)
    with pytest.raises(FileNotFound):
        store.batches.add("other", "batch_9", "openai", FACTS, input_file_id="file-1", window_s=1.0, limits=LIMITS)


def test_batches_are_listed_from_the_newest_on(store: Store, now_s: list[float]) -> None:
    for name in "abc":
        add_batch(store, name)
        now_s[0] += 1.0
    page = store.batches.page("acme", "openai", after=None, limit=2)
    assert page is not None
    assert [batch.id for batch in page] == ["batch_c", "batch_b"]
    page = store.batches.page("acme", "openai", after="batch_b", limit=2)
    assert page is not None
    assert [batch.id for batch in page] == ["batch_a"]
    assert store.batches.page("acme", "openai", after="batch_x", limit=2) is None
    assert store.batches.page("acme", "anthropic", after=None, limit=2) == []


def test_what_is_no_longer_kept_goes_with_its_files(store: Store, now_s: list[float]) -> None:
    lease = begun(store)
    store.batches.commit(lease, [row(1)])
    spill = store.batches.next_spill(lease, 1, 100)
    assert spill is not None
    store.batches.spilled(lease, spill, Chunk("a", 3))
    now_s[0] += 1000.0  # its input has expired, and stays for as long as it is read
    assert store.files.sweep() == []
    batch = store.batches.end(lease, "completed")
    assert [file.id for file in store.files.sweep()] == ["file-1"]
    assert store.batches.sweep() == 0
    now_s[0] += 100.0
    assert store.batches.sweep() == 1
    assert store.batches.find("acme", "batch_1", "openai") is None
    gone = store.files.sweep()
    assert {file.id for file in gone} == {"file-1", batch.facts.output_file_id}
    for file in gone:
        store.files.gone(file)
    assert store.files.sweep() == []


def test_a_file_in_use_is_not_deleted(store: Store) -> None:
    lease = begun(store)
    with pytest.raises(Conflict, match="batch_1"):
        store.files.begin_delete("acme", "file-1")
    assert store.files.begin_delete("other", "file-1") is None
    store.batches.end(lease, "completed")
    found = store.files.begin_delete("acme", "file-1")
    assert found is not None
    assert store.files.find("acme", "file-1") is None
    assert [file.id for file in store.files.sweep()] == ["file-1"]  # until its objects are gone
    store.files.gone(found)
    assert store.files.sweep() == []


def test_files_are_bounded_in_number_and_bytes(store: Store, now_s: list[float]) -> None:
    for n in range(4):
        add_file(store, file_id=f"file-{n}", num_bytes=200)
    store.files.begin("acme", "file-4", FILES)
    with pytest.raises(StorageQuotaExceeded):
        store.files.add_chunk("acme", "file-4", Chunk("x", 201), FILES)
    with pytest.raises(StorageQuotaExceeded):
        store.files.begin("acme", "file-5", FILES)
    add_file(store, "other", num_bytes=1000)
    now_s[0] += ABANDONED_S
    assert "file-4" in {file.id for file in store.files.sweep()}
    with pytest.raises(Conflict):
        store.files.finish("acme", "file-4", purpose="batch", filename="x", ttl_s=1.0)


def test_a_removed_tenant_takes_its_files_and_batches_along(store: Store) -> None:
    store.add_tenant({"id": "acme"})
    begun(store)
    store.remove_tenant("acme")
    assert store.batches.find("acme", "batch_1", "openai") is None
    assert {file.id for file in store.files.sweep()} == {"file-1", "file-out-1", "file-err-1"}
