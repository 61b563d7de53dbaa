"""A greedy tenant at a real replica, and another one's chats beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.drills import greedy
from tools.drills.stand import stand

from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.drill]


async def test_chats_do_not_wait_behind_another_tenants_backlog(tmp_path: Path) -> None:
    with stand(tmp_path, context=greedy.CONTEXT) as place:
        replica = place.replica(*greedy.REPLICA)
        eventually(replica.is_ready)
        alone, beside, behind = await greedy.drill(replica, num_chats=24)
        assert beside.texts == alone.texts
        assert beside.busy > 0
        assert beside.p95_s < behind.median_s
        assert place.complaints() == []
