"""Fields of completions through the gateway: answered as at the replica, and charged for all that was made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.running import RunningGateway, running_gateway
from tests.server.replica import NAME, Replica
from tests.waiting import eventually


@pytest.fixture(scope="module")
def replica(replica_at_hand: Replica) -> Replica:
    return replica_at_hand


@pytest.fixture(scope="module")
def gateway(replica: Replica) -> Iterator[RunningGateway]:
    with running_gateway(replica) as found:
        yield found
        eventually(found.is_idle)


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": True, "logprobs": 1},
        {"echo": True, "logprobs": 1, "stream": True},
        {"extra_body": {"prompt_logprobs": 1}},
        {"best_of": 3, "seed": 5},
    ],
    ids=str,
)
def test_answers_are_the_replicas_and_all_that_was_made_is_charged(
    gateway: RunningGateway, replica: Replica, fields: Any
) -> None:
    asked: Any = {"model": NAME, "prompt": "a prompt", "max_tokens": 4, "temperature": 0} | fields
    if fields.get("best_of"):
        asked.pop("temperature")
    before = len(gateway.ledger.usages)
    ours, theirs = gateway.openai.completions.create(**asked), replica.openai.completions.create(**asked)
    if asked.get("stream"):
        assert [one.choices for one in ours] == [one.choices for one in theirs]
    else:
        assert ours.choices == theirs.choices
    eventually(lambda: len(gateway.ledger.usages) > before)
    usage = gateway.ledger.usages[-1]
    num_choices = fields.get("best_of", 1)
    assert (usage.input_tokens, usage.output_tokens) == (len(replica.prompt_ids("a prompt")), 4 * num_choices)


@pytest.mark.parametrize(
    ("tenants", "asked", "served"),
    [("interactive", "priority", "priority"), ("standard", "priority", "default"), ("standard", "flex", "flex")],
)
def test_a_service_tier_is_never_more_urgent_than_the_tenants_class(
    gateway: RunningGateway, tenants: str, asked: Any, served: str
) -> None:
    client = gateway.client(gateway.add_tenant(f"{tenants}-{asked}", priority=tenants))
    messages: Any = [{"role": "user", "content": "hello"}]
    answer = client.chat.completions.create(model=NAME, messages=messages, max_tokens=2, service_tier=asked)
    assert answer.service_tier == served
    plain = client.chat.completions.create(model=NAME, messages=messages, max_tokens=2)
    assert plain.service_tier is None
