from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.watch import payloads
from penstock.watch.alerts import Alert, AlertBoard, Condition
from penstock.watch.kinds import AT_RISK, BURNING, BURNING_FAST, KINDS, QUEUE, SLOW, AlertKind
from penstock.watch.notices import Notices


def condition(kind: AlertKind = SLOW, replica: str = "r0", **more: object) -> Condition:
    return Condition(kind=kind, summary=f"{replica} is slow & <b>", value=0.5, model="m", replica=replica, **more)  # type: ignore[arg-type]


def fired(replica: str = "r0", kind: AlertKind = SLOW) -> Alert:
    return AlertBoard().update([condition(kind, replica)], 0.0, 1000.0)[0]


# -- the board


def test_what_must_last_is_an_alert_only_after_that() -> None:
    board = AlertBoard()
    for second in range(180):
        assert board.update([condition(QUEUE)], float(second), 0.0) == []
    assert [alert.alert for alert in board.update([condition(QUEUE)], 180.0, 0.0)] == ["QueueSustained"]


def test_what_pauses_before_it_is_an_alert_begins_again() -> None:
    board = AlertBoard()
    for second in range(400):
        held = [condition(QUEUE)] if second % 170 else []
        assert board.update(held, float(second), 0.0) == []


def test_what_fires_does_not_flap() -> None:
    board = AlertBoard(hold_s=60.0)
    changed = []
    for second in range(600):
        changed += board.update([condition()] if second < 300 and second % 50 < 5 else [], float(second), float(second))
    assert [(alert.state, alert.since, alert.resolved_at) for alert in changed] == [
        ("firing", 0.0, None),
        ("resolved", 0.0, 314.0),
    ]
    assert [alert.state for alert in board.shown(600.0)] == ["resolved"]
    assert board.shown(90_000.0) == []


def test_the_more_urgent_of_two_signs_is_the_alert() -> None:
    board = AlertBoard()
    about = ("m", "errors")
    held = [condition(BURNING, about=about), condition(BURNING_FAST, about=about)]
    assert {alert.alert for second in range(200) for alert in board.update(held, float(second), 0.0)} == {
        "BudgetBurningFast"
    }


def test_a_cause_hides_what_it_explains_and_for_a_while_after() -> None:
    board = AlertBoard()
    cause, sign = condition(explains=frozenset({("m", "ttft")})), condition(AT_RISK, about=("m", "ttft"))
    changed = [alert for second in range(600) for alert in board.update([cause, sign], float(second), 0.0)]
    changed += [alert for second in range(600, 4000) for alert in board.update([sign], float(second), 0.0)]
    assert [(alert.alert, alert.state) for alert in changed] == [("ReplicaSlow", "firing"), ("ReplicaSlow", "resolved")]
    changed = [alert for second in range(4000, 4700) for alert in board.update([sign], float(second), 0.0)]
    assert [alert.alert for alert in changed] == ["ObjectiveAtRisk"]


# -- messages


def test_alerts_of_a_kind_and_model_are_one_message() -> None:
    notices = Notices(wait_s=10.0)
    notices.take([fired("r0")], 0.0)
    notices.take([fired("r1")], 5.0)
    assert notices.due(9.0) == []
    [notice] = notices.due(10.0)
    assert [alert.replica for alert in notice.alerts] == ["r0", "r1"]
    assert notices.due(100.0) == []


def test_what_goes_on_is_told_again_and_its_end_once() -> None:
    notices = Notices(wait_s=0.0, interval_s=60.0, repeat_s=3600.0)
    alert = fired()
    notices.take([alert], 0.0)
    assert [notice.status for notice in notices.due(0.0)] == ["firing"]
    assert notices.due(3599.0) == []
    assert [notice.status for notice in notices.due(3600.0)] == ["firing"]
    board = AlertBoard(hold_s=1.0)
    board.update([condition()], 0.0, 1000.0)
    notices.take(board.update([], 5.0, 1005.0), 3700.0)
    assert [notice.status for notice in notices.due(3700.0)] == ["resolved"]
    assert notices.due(1e9) == []


def test_what_came_and_went_before_the_first_message_is_none() -> None:
    notices, board = Notices(wait_s=10.0), AlertBoard(hold_s=1.0)
    notices.take(board.update([condition()], 0.0, 0.0), 0.0)
    notices.take(board.update([], 5.0, 5.0), 5.0)
    assert notices.due(1e9) == []


def test_payload_is_alertmanagers() -> None:
    notices = Notices(wait_s=0.0)
    notices.take([fired("r0"), fired("r1")], 0.0)
    [notice] = notices.due(0.0)
    found = json.loads(payloads.alertmanager(notice, "https://books.example/"))
    assert (found["version"], found["status"], found["groupLabels"]) == (
        "4",
        "firing",
        {"alertname": "ReplicaSlow", "model": "m"},
    )
    assert found["commonLabels"] == {"alertname": "ReplicaSlow", "severity": "ticket", "model": "m"}
    first = found["alerts"][0]
    assert first["labels"]["replica"] == "r0"
    assert (first["startsAt"], first["endsAt"]) == ("1970-01-01T00:16:40Z", "0001-01-01T00:00:00Z")
    assert first["annotations"]["runbook_url"] == "https://books.example/replica-slow.md"


def test_slack_gets_a_short_text_without_its_own_signs() -> None:
    notices = Notices(wait_s=0.0)
    notices.take([fired()], 0.0)
    text = json.loads(payloads.slack(notices.due(0.0)[0], "docs/runbooks"))["text"]
    assert text.splitlines()[:2] == ["*[ticket] ReplicaSlow*", "• r0 is slow &amp; &lt;b&gt;"]


# -- runbooks


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_alert_has_a_runbook_and_a_line_in_the_docs(kind: AlertKind) -> None:
    root = Path(__file__).parents[2]
    assert kind.name in (root / kind.page).read_text()
    assert f"| `{kind.name}` | {kind.severity} | {kind.means} |" in (root / "docs" / "alerts.md").read_text()
