from __future__ import annotations

import msgspec
import pytest

from penstock.gateway.monitor.alert_sender import AlertSender, CourierView
from penstock.watch.notices import Notice
from tests.clocks import ManualClock
from tests.waiting import eventually_async
from tests.watch.sink import sinking


def notice(name: str) -> Notice:
    return Notice((name, "m"), ())


def payload(told: Notice) -> bytes:
    return msgspec.json.encode({"name": told.group[0]})


async def test_what_is_not_taken_is_tried_again_and_in_order() -> None:
    with sinking() as sink:
        sink.statuses = [503, 429]
        clock = ManualClock()
        sender = AlertSender("webhook", f"{sink.url}/hook?team=1", payload, clock)
        sender.take(notice("a"))
        sender.take(notice("b"))
        for pause_s in (1.0, 2.0):
            await eventually_async(lambda: clock.waits_s, lambda waits_s: pause_s in waits_s)  # noqa: B023
            clock.advance(pause_s)
        await eventually_async(lambda: sender.view, lambda view: view == CourierView("webhook", 2, 0, 0, 0))
        assert sink.taken == [("/hook?team=1", {"name": "a"}), ("/hook?team=1", {"name": "b"})]
        assert sink.num_asked == 4
        sender.close()


async def test_what_is_refused_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    with sinking() as sink:
        sink.statuses = [404]
        sender = AlertSender("slack", sink.url, payload, ManualClock())
        sender.take(notice("a"))
        await eventually_async(lambda: sender.view.failed, lambda num_failed: num_failed == 1)
        assert sink.num_asked == 1
        assert "could not be delivered by slack: status 404" in caplog.text
        sender.close()


async def test_an_address_that_is_not_there_keeps_nobody_waiting_and_loses_the_oldest() -> None:
    sender = AlertSender("webhook", "http://127.0.0.1:9", payload, ManualClock())
    for number in range(150):
        sender.take(notice(str(number)))
    assert (sender.view.waiting, sender.view.lost) == (100, 50)
    sender.close()


async def test_a_message_that_cannot_be_put_into_words_is_lost_alone() -> None:
    def picky(told: Notice) -> bytes:
        if told.group[0] == "a":
            raise ValueError("no words for it")
        return payload(told)

    with sinking() as sink:
        sender = AlertSender("webhook", sink.url, picky, ManualClock())
        sender.take(notice("a"))
        sender.take(notice("b"))
        await eventually_async(lambda: sender.view, lambda view: view == CourierView("webhook", 1, 1, 0, 0))
        assert [body for _, body in sink.taken] == [{"name": "b"}]
        sender.close()
