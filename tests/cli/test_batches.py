"""Batches at real gateways: one is killed in the middle of a batch, and another takes it over."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.tenancy.store import open_store
from tests.cli.real_gateway import RealGateway, real_gateway
from tests.gateway.batches.batching import chat, create, ended, lines, results
from tests.sdk import Unverified
from tests.server.replica import serving
from tests.waiting import eventually

pytestmark = pytest.mark.slow

BATCHES = {"lease_s": 2, "max_in_flight": 4}


def client_of(gateway: RealGateway, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=2, http_client=Unverified())


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_batch_outlives_its_gateway_and_each_row_is_billed_once(tmp_path: Path, how: str) -> None:
    batches = BATCHES | {"files": str(tmp_path / "files")}
    price = {"input": 2_000_000.0, "output": 4_000_000.0}
    with serving(step_s=0.01) as replica, open_store(f"sqlite:///{tmp_path / 'tenants.db'}") as store:
        num_rows, is_over = 15, True
        while is_over:  # it had ended before its gateway was killed
            num_rows *= 2
            tenant_id = store.add_tenant({"id": f"acme-{num_rows}"}).id
            key = store.create_key(tenant_id).secret
            ending = killed_gateway if how == "killed" else real_gateway
            with ending(tmp_path, replica, price=price, batches=batches) as first:
                client = client_of(first, key)
                batch = create(client, lines([chat(f"number {n}", max_tokens=12) for n in range(num_rows)]))
                eventually(partial(num_completed, client, batch.id), lambda count: count >= 5)
            kept = store.batches.find(tenant_id, batch.id, "openai")
            is_over = kept is None or not kept.is_active
        with real_gateway(tmp_path, replica, price=price, batches=batches) as second:
            client = client_of(second, key)
            found = ended(client, batch.id)
            answered = results(client, found.output_file_id)
        (used,) = store.usage.sums(tenant_id, since_s=0, until_s=1e12, by="all")
        said = {f"row-{n + 1}": replica.answer(question(n), 12) for n in range(num_rows)}
    assert found.status == "completed"
    bodies = {row: told["response"]["body"] for row, told in answered.items()}
    assert {row: body["choices"][0]["message"]["content"] for row, body in bodies.items()} == said
    tokens = [sum(body["usage"][kind] for body in bodies.values()) for kind in ("prompt_tokens", "completion_tokens")]
    assert (used.requests, [used.input_tokens, used.output_tokens]) == (num_rows, tokens)
    assert used.cost_nanos == 1e9 * (2 * tokens[0] + 4 * tokens[1]) / 2
    assert "is taken over" in second.log.read_text()


@contextlib.contextmanager
def killed_gateway(*arguments: Any, **settings: Any) -> Iterator[RealGateway]:
    """One that has no time for anything when it ends."""
    with contextlib.suppress(_Killed), real_gateway(*arguments, **settings) as gateway:
        yield gateway
        gateway.process.kill()
        gateway.process.wait()
        raise _Killed


class _Killed(Exception):
    pass


def num_completed(client: openai.OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    assert counts is not None
    return counts.completed


def question(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"number {number}"}]
