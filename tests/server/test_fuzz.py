"""A replica under attack: it is reached by gateways, and on a laptop by everybody."""

from __future__ import annotations

import pytest
from tools.drills.fuzz import fuzz

from tests.server.replica import NAME, Replica
from tests.waiting import eventually


@pytest.mark.parametrize(
    ("seed", "count"),
    [
        (3, 600),
        pytest.param(4, 3000, marks=pytest.mark.slow),
        pytest.param(5, 10_000, marks=[pytest.mark.slow, pytest.mark.drill]),
    ],
    ids=["some", "many", "drill"],
)
def test_what_no_client_should_send_is_refused_and_leaves_nothing_behind(
    replica: Replica, caplog: pytest.LogCaptureFixture, seed: int, count: int
) -> None:
    found = fuzz(replica.host, replica.port, NAME, seed=seed, count=count)
    assert found.faults == []
    # Some of the requests are good; how many of those a busy machine turns away is its own affair.
    assert found.statuses[200] > 0
    assert found.statuses[200] + found.statuses[429] + found.statuses[529] > count // 20
    assert [record for record in caplog.records if record.exc_info] == []
    eventually(replica.is_idle)
    answer = replica.openai.completions.create(model=NAME, prompt="the fox", max_tokens=5, temperature=0)
    assert answer.choices[0].text == replica.answer("the fox", 5)
