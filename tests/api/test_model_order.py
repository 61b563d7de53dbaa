"""An order is followed until it is done, or cannot be."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock.api.model_order import FollowedOrder, ModelSeen
from penstock.core.errors import Conflict, EngineFailed

GIVEN = ModelSeen("m", "unloaded", "load", 4.0, "", "", 0)


def test_a_load_is_done_when_the_model_is_there_and_the_order_over() -> None:
    order = FollowedOrder("load", GIVEN)
    assert not order.is_done(GIVEN)
    assert not order.is_done(replace(GIVEN, state="loading", eta_s=2.0))
    assert not order.is_done(replace(GIVEN, state="loaded")), "it may be about to leave by the order before"
    assert order.is_done(replace(GIVEN, state="loaded", order="", eta_s=None))


def test_an_unload_and_a_park_are_done_when_the_model_is_away() -> None:
    given = replace(GIVEN, state="loaded", order="unload", eta_s=None)
    assert FollowedOrder("unload", given).is_done(replace(given, state="unloaded"))
    park = FollowedOrder("park", replace(given, order="park"))
    assert not park.is_done(replace(given, state="draining", order="park"))
    assert park.is_done(replace(given, state="parked", order=""))


def test_what_keeps_an_order_from_being_done_is_told() -> None:
    order = FollowedOrder("load", replace(GIVEN, failed_loads=1))
    with pytest.raises(EngineFailed, match="m: out of memory"):
        order.is_done(replace(GIVEN, failed_loads=2, failure="out of memory"))
    with pytest.raises(Conflict, match="too little"):
        FollowedOrder("load", GIVEN).is_done(replace(GIVEN, refusal="0.5 GiB too little"))
    with pytest.raises(Conflict, match="another order came, to unload it"):
        FollowedOrder("load", GIVEN).is_done(replace(GIVEN, order="unload"))
    with pytest.raises(Conflict, match="the model is unloaded again"):
        FollowedOrder("load", GIVEN).is_done(replace(GIVEN, order="", eta_s=None))
