"""What a pod's deletion cost says, and how seldom it is said."""

from __future__ import annotations

import pytest

from penstock.fleet.drivers.driver import ReplicaNote
from penstock.fleet.drivers.kubernetes_notes import DELETION_COST, PodNotes, deletion_cost
from penstock.http.kubernetes_api import ClusterSettings, KubernetesApi

POD = {"metadata": {"name": "p", "uid": "u", "labels": {"penstock.dev/state": "active"}}}


@pytest.mark.parametrize(
    ("tokens", "cost"), [(0, "0"), (1, "1"), (1023, "512"), (1024, "1024"), (10**12, str(2**31 - 1))]
)
def test_the_more_a_replica_holds_the_dearer_it_is(tokens: int, cost: str) -> None:
    assert deletion_cost(ReplicaNote("active", tokens)) == cost


async def test_a_cost_is_told_when_it_has_changed_and_not_more_often_than_every_half_minute() -> None:
    now = [0.0]
    notes = PodNotes(KubernetesApi(ClusterSettings()), lambda: now[0])

    def patch(tokens: int, *, has_cost: bool = True) -> object:
        return notes._patch(POD, ReplicaNote("active", tokens), has_cost)

    assert patch(0) is None
    assert patch(100, has_cost=False) is None
    assert patch(100) == {"metadata": {"annotations": {DELETION_COST: "64"}}}
    now[0] = 29.0
    assert patch(1000) is None
    now[0] = 30.0
    assert patch(1000) == {"metadata": {"annotations": {DELETION_COST: "512"}}}
