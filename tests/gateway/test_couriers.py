from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from penstock.gateway.couriers import Courier, CourierView
from penstock.watch.notices import Notice
from tests.patience import Patience
from tests.watch.sink import sinking


def notice(name: str) -> Notice:
    return Notice((name, "m"), ())


def payload(told: Notice) -> bytes:
    return msgspec.json.encode({"name": told.group[0]})


async def until(condition: Callable[[], bool]) -> None:
    patience = Patience(5.0)
    while not condition():
        patience.look()
        await asyncio.sleep(0.005)


async def test_what_is_not_taken_is_tried_again_and_in_order() -> None:
    with sinking() as sink:
        sink.statuses = [503, 429]
        courier = Courier("webhook", f"{sink.url}/hook?team=1", payload, first_pause_s=0.01)
        courier.take(notice("a"))
        courier.take(notice("b"))
        await until(lambda: len(sink.taken) == 2)
        await until(lambda: courier.view == CourierView("webhook", 2, 0, 0, 0))
        assert sink.taken == [("/hook?team=1", {"name": "a"}), ("/hook?team=1", {"name": "b"})]
        assert sink.num_asked == 4
        courier.close()


async def test_what_is_refused_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    with sinking() as sink:
        sink.statuses = [404]
        courier = Courier("slack", sink.url, payload, first_pause_s=0.01)
        courier.take(notice("a"))
        await until(lambda: courier.view.failed == 1)
        assert sink.num_asked == 1
        assert "could not be delivered by slack: status 404" in caplog.text
        courier.close()


async def test_an_address_that_is_not_there_keeps_nobody_waiting_and_loses_the_oldest() -> None:
    courier = Courier("webhook", "http://127.0.0.1:9", payload, first_pause_s=10.0)
    for number in range(150):
        courier.take(notice(str(number)))
    assert (courier.view.waiting, courier.view.lost) == (100, 50)
    courier.close()
