"""How batches run: what their rows cost, when they are over, and who goes on with them."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from penstock.gateway.batches.s3 import s3_store
from penstock.gateway.batches.settings import BatchSettings
from penstock.gateway.settings.gateway import ModelSettings
from penstock.tenancy.prices import Price
from penstock.tenancy.store import Store, open_store
from tests.fake_s3 import KEYS, REGION, fake_s3
from tests.gateway.batches.batching import batching, chat, create, ended, lines, results
from tests.server.replica import NAME, Replica
from tests.waiting import eventually

PRICE = Price(input=2_000_000.0, output=4_000_000.0)  # a token is 2 and 4


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"sqlite:///{tmp_path / 'penstock.db'}")


def test_rows_are_billed_once_at_half_price_when_their_results_are_written(
    store: Store, tmp_path: Path, replica_at_hand: Replica
) -> None:
    at = [f"http://{replica_at_hand.host}:{replica_at_hand.port}"]
    pools = {NAME: ModelSettings(replicas=at, price=PRICE)}
    with batching(store, tmp_path / "files", pools=pools) as gateway:
        client = gateway.client(gateway.add_tenant("payer"))
        batch = ended(client, create(client, lines([chat("one"), chat("two")])).id)
        used = [row["response"]["body"]["usage"] for row in results(client, batch.output_file_id).values()]
        metrics = gateway.metrics()
    (total,) = store.usage.sums("payer", since_s=0, until_s=1e12, by="all")
    tokens = [sum(one[kind] for one in used) for kind in ("prompt_tokens", "completion_tokens")]
    assert (total.requests, [total.input_tokens, total.output_tokens]) == (2, tokens)
    assert total.cost_nanos == 1e9 * (2 * tokens[0] + 4 * tokens[1]) / 2
    assert gateway.ledger.usages == []  # the gateway's own ledger hears of none of it
    assert f'penstock_gateway_request_seconds_count{{model="{NAME}"}} 0' in metrics  # no objective is for rows


def test_what_is_not_run_within_the_window_expires(store: Store, tmp_path: Path, replica_at_hand: Replica) -> None:
    now_s = [1e9]
    aged = Store(store._database, clock=lambda: now_s[0])
    with batching(aged, tmp_path / "files", replica_at_hand) as gateway:
        gateway.set_in_use(replica_at_hand, False)
        client = gateway.openai
        batch = create(client, lines([chat()] * 2))
        eventually(lambda: client.batches.retrieve(batch.id).status, lambda status: status == "in_progress")
        now_s[0] += 24 * 3600
        found = ended(client, batch.id)
        told = results(client, found.error_file_id)
        gateway.set_in_use(replica_at_hand, True)
    assert (found.status, found.expired_at) == ("expired", int(now_s[0]))
    assert {row["error"]["code"] for row in told.values()} == {"batch_expired"}
    now_s[0] += BatchSettings().keep_s
    assert aged.batches.sweep() == 1
    assert aged.files.find("anonymous", found.error_file_id or "") is None


def test_a_batch_goes_on_at_another_gateway_when_its_own_is_stopped(
    store: Store, tmp_path: Path, replica_at_hand: Replica
) -> None:
    with batching(store, tmp_path / "files", replica_at_hand) as gateway:
        gateway.set_in_use(replica_at_hand, False)
        batch = create(gateway.openai, lines([chat()] * 2))
        states = lambda: gateway.openai.batches.retrieve(batch.id).status  # noqa: E731
        eventually(states, lambda status: status == "in_progress")
    with batching(store, tmp_path / "files", replica_at_hand) as gateway:
        found = ended(gateway.openai, batch.id)
    assert (found.status, found.request_counts and found.request_counts.completed) == ("completed", 2)


def test_files_and_results_are_in_a_bucket_that_all_gateways_reach(store: Store, replica_at_hand: Replica) -> None:
    with fake_s3() as s3:
        objects = s3_store(f"s3://bucket/penstock?endpoint={s3.url}&region={REGION}", KEYS)
        with batching(store, objects, replica_at_hand) as gateway:
            batch = ended(gateway.openai, create(gateway.openai, lines([chat()])).id)
            assert list(results(gateway.openai, batch.output_file_id)) == ["row-1"]
            assert len(s3.objects) == 2
            for file_id in (batch.input_file_id, batch.output_file_id):
                gateway.openai.files.delete(file_id or "")
        assert s3.objects == {}


def test_a_tenant_has_room_for_so_many_bytes_and_rows(store: Store, tmp_path: Path, replica_at_hand: Replica) -> None:
    content = lines([chat("x" * 500)] * 3)
    settings = BatchSettings(max_bytes_per_tenant=1 << 20, max_rows_per_tenant=2, max_file_bytes=1 << 20)
    with batching(store, tmp_path / "files", replica_at_hand, settings=settings) as gateway:
        client = gateway.openai
        batch = ended(client, create(client, content).id)
        assert batch.errors is not None
        assert [one.code for one in batch.errors.data or ()] == ["storage_quota_exceeded"]
        with pytest.raises(openai.BadRequestError) as refused:
            create(client, b"x" * (1 << 20))
        assert refused.value.code == "storage_quota_exceeded"
        with pytest.raises(openai.APIStatusError) as too_large:
            create(client, b"x" * ((1 << 20) + 1))
        assert too_large.value.status_code == 413
        assert len(list(client.files.list())) == 1
    assert len(list((tmp_path / "files").rglob("0*"))) == 1  # nothing is left of those that were refused


def test_a_gateway_without_a_store_of_files_says_so(store: Store, replica_at_hand: Replica) -> None:
    with batching(store, None, replica_at_hand) as gateway:
        for refused in (gateway.openai.files.list, gateway.openai.batches.list):
            with pytest.raises(openai.NotFoundError, match=r"batches\.files"):
                refused()
        with pytest.raises(openai.NotFoundError, match=r"batches\.files"):
            create(gateway.openai, b"{}")
