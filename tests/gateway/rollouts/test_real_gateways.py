"""Two gateways as users start them: what both measured of one rollout is in the store when they have ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.rollout import Arm, Cell, CellKey, Metric
from penstock.tenancy.rollouts import new_rollout
from penstock.tenancy.store import open_store
from tests.cli.real_gateway import real_gateway
from tests.gateway.provider import providing
from tests.gateway.rollouts.measuring import MESSAGES
from tests.waiting import eventually

ASKED = {"model": "small", "messages": MESSAGES}


@pytest.mark.slow
def test_gateways_measure_a_rollout_together_and_lose_nothing_when_they_are_ended(tmp_path: Path) -> None:
    with providing(says="one") as one, providing(says="two") as two:
        versions = {"v1": {"replicas": [one.url], "weight": 1}, "v2": {"replicas": [two.url], "weight": 0}}
        models = {"small": {"versions": versions}}
        with real_gateway(tmp_path, models=models) as first, real_gateway(tmp_path, models=models) as second:
            with open_store(first.store) as store:
                rollout = store.rollouts.start(new_rollout("small", "v1", "v2"))  # without a plan nobody decides
                store.add_tenant({"id": "acme"}), store.add_tenant({"id": "calm", "stays": True})
                key, calm = (store.create_key(name).secret for name in ("acme", "calm"))
            for gateway in (first, second):
                eventually(lambda gateway=gateway: gateway.knows(calm))
                answers = [gateway.ask("POST", "/v1/chat/completions", ASKED, key=key) for _ in range(3)]
                assert [status for status, _ in answers] == [200] * 3
                assert gateway.ask("POST", "/v1/chat/completions", ASKED, key=calm)[0] == 200
                said = {"request_id": "x", "score": "good"}
                assert gateway.ask("POST", "/v1/penstock/feedback", said, key=key) == (202, {"accepted": True})
        with open_store(first.store) as store:
            cells: dict[CellKey, Cell] = {}
            blocks = store.rollouts.blocks(rollout.id)[1]
            for block in blocks:
                for cell_key, cell in block.cells:
                    cells.setdefault(cell_key, Cell()).merge(cell)
            assert len({block.gateway for block in blocks}) == 2
            assert cells[CellKey(Metric.ERRORS, Arm.OLD)] == Cell(6, 0.0, 0.0)
            assert cells[CellKey(Metric.ERRORS, Arm.OLD, "", "acme")].count == 6
            assert len(store.rollouts.feedback_since(0)) == 1
