"""Engines of different kinds as versions of one model: a server of another dialect, and penstock replicas after it."""

from __future__ import annotations

from typing import Any

from penstock.gateway.settings.gateway import ModelSettings
from penstock.gateway.settings.route_board import RouteBoard
from penstock.tenancy.routes import RouteRevision
from tests.dialects.servers import FakeVllm
from tests.gateway.proxy.test_versions import MESSAGES, counts
from tests.gateway.running import running_gateway
from tests.server.replica import NAME, Replica
from tests.waiting import eventually


def test_a_model_moves_from_vllm_to_penstock_and_back(replica_at_hand: Replica) -> None:
    replica = replica_at_hand
    ours = replica.answer(MESSAGES, 5)
    with FakeVllm("org/small") as theirs:
        versions = {
            "vllm": {"replicas": [theirs.url], "dialect": "vllm", "served_as": "org/small", "weight": 100},
            "penstock": {"replicas": [f"http://{replica.host}:{replica.port}"], "shadow": 1.0},
        }
        with running_gateway(pools={NAME: ModelSettings(versions=versions)}) as gateway:

            def say(model: str = NAME, **more: Any) -> str:
                found: Any = gateway.openai.chat.completions.create(
                    model=model, messages=MESSAGES, max_tokens=5, temperature=0, stream=True, **more
                )
                return "".join(chunk.choices[0].delta.content or "" for chunk in found if chunk.choices)

            def shares(revision: int, vllm: float, penstock: float) -> None:
                def apply() -> None:
                    board = RouteBoard(gateway.app.routes)
                    board.changed = gateway.app.use
                    board.apply(
                        [RouteRevision(NAME, revision, {"vllm": vllm, "penstock": penstock}, {"penstock": 0.0})]
                    )

                gateway.call(apply)

            foreign = say()
            assert foreign
            assert foreign != ours
            copied = f'model="{NAME}@penstock",outcome="ok"'
            eventually(lambda: counts(gateway, "penstock_gateway_shadow_requests_total", copied) == 1)
            assert say(f"{NAME}@penstock") == ours
            shares(1, 50.0, 50.0)
            users = [f"user {number}" for number in range(8)]
            said = {user: say(user=user) for user in users}
            assert set(said.values()) == {foreign, ours}
            assert {user: say(user=user) for user in users} == said
            shares(2, 0.0, 100.0)
            assert {say(user=user) for user in users} == {ours}
            shares(3, 100.0, 0.0)
            assert say() == foreign
            assert {asked[1]["model"] for asked in theirs.asked} == {"org/small"}
            eventually(lambda: len(gateway.ledger.usages) == 27)
            assert {usage.model for usage in gateway.ledger.usages} == {f"{NAME}@vllm", f"{NAME}@penstock"}
