"""The residency policy on a device of the tests: what must hold in every step is asserted by the world itself."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.residency import Residence, Wish
from penstock.fleet.residency.policy import Rules
from tests.fleet.residency.world import GIB, World, needs

RULES = Rules(device_bytes=20 * GIB, min_residence_s=30.0)


def test_a_model_is_loaded_by_its_first_request() -> None:
    world = World(RULES, needs("a", 5), needs("b", 5))
    world.ask("b")
    world.run(10)
    assert (world["a"].state, world["b"].state) == (Residence.UNLOADED, Residence.LOADED)
    assert world["b"].num_served == 1
    assert world["b"].total_bytes == 9.5 * 1 * GIB + GIB // 2  # half of what two floors leave


def test_without_leave_to_load_by_use_requests_are_refused_until_an_order() -> None:
    world = World(Rules(20 * GIB, load_on_use=False), needs("a", 5))
    world.ask("a")
    world.run(10)
    assert world.state("a") is Residence.UNLOADED
    assert "not loaded by use" in world["a"].was_refused
    world["a"].wish = Wish.LOAD
    world.run(10)
    assert world.state("a") is Residence.LOADED
    assert not world["a"].was_refused


def test_the_model_that_was_used_longest_ago_leaves() -> None:
    world = World(RULES, needs("a", 6), needs("b", 6), needs("c", 6))
    for name in "ab":
        world.ask(name)
        world.run(40)
    world.ask("a")
    world.run(5)
    world.ask("c")
    world.run(20)
    assert [world[name].state for name in "abc"] == [Residence.LOADED, Residence.UNLOADED, Residence.LOADED]


def test_a_stream_is_waited_for_and_new_requests_wait_for_their_turn() -> None:
    world = World(RULES, needs("a", 15), needs("b", 15))
    world.ask("a", takes_s=200)
    world.run(10)
    world.ask("b")
    world.run(60)  # the minimum residence is over
    assert world.state("a") is Residence.DRAINING
    world.ask("a")
    world.run(60)
    assert (world["a"].state, len(world["a"].ends)) == (Residence.DRAINING, 1)
    world.run(100)
    assert world["b"].num_served == 1
    world.run(60)
    assert world["a"].num_served == 2


def test_two_models_that_need_the_whole_device_take_turns() -> None:
    """Two tenants ask all the time. Without the minimum residence the models would change places with each request."""
    world = World(RULES, needs("a", 15), needs("b", 15))
    for _ in range(600):
        world.ask("a")
        world.ask("b")
        world.step()
    turns = world.history
    assert all(one != other for one, other in pairwise(turns))
    assert 600 / (30 + 10) - 2 <= len(turns) <= 600 / 30 + 1
    assert min(world[name].num_served for name in "ab") > 200


def test_a_model_that_drains_stays_if_nobody_needs_its_memory_any_more() -> None:
    world = World(RULES, needs("a", 15), needs("b", 15))
    world.ask("a", takes_s=500)
    world.run(40)
    world.ask("b")
    world.run(2)
    assert world.state("a") is Residence.DRAINING
    world["b"].waiting.clear()  # its client went away
    world.run(2)
    assert world.state("a") is Residence.LOADED
    assert world["a"].num_loads == 1


def test_pinned_models_stay_and_what_does_not_fit_beside_them_is_refused_in_figures() -> None:
    world = World(RULES, needs("a", 8), needs("b", 15), needs("c", 5))
    world["a"].pinned = True
    world.run(5)
    assert world.state("a") is Residence.LOADED
    world.ask("b")
    world.ask("c")
    world.run(100)
    assert "b needs 16.00 GiB" in world["b"].was_refused
    assert "by a) and" in world["b"].was_refused
    assert [world[name].num_served for name in "bc"] == [0, 1]


def test_a_model_larger_than_the_device_is_refused_at_once() -> None:
    world = World(RULES, needs("a", 25), needs("b", 5))
    world.ask("a")
    world.run(2)
    assert world["a"].was_refused.endswith("6.00 GiB too little")


def test_what_an_operator_unloaded_stays_out_until_it_is_loaded() -> None:
    world = World(RULES, needs("a", 5))
    world.ask("a", takes_s=50)
    world.run(10)
    world["a"].wish = Wish.UNLOAD
    world.run(20)
    assert (world["a"].state, len(world["a"].ends)) == (Residence.DRAINING, 1)
    world.run(60)
    world.ask("a")
    world.run(10)
    assert world.state("a") is Residence.UNLOADED
    assert "penstock models load" in world["a"].was_refused


def test_a_model_that_frees_enough_by_being_parked_is_parked_and_comes_again() -> None:
    world = World(RULES, needs("a", 4, parked=4, most=10), needs("b", 12, most=1), can_park=True)
    world.ask("a")
    world.run(40)
    assert world["a"].total_bytes == 7 * GIB
    world.ask("b")
    world.run(20)
    assert (world["a"].state, world["b"].state) == (Residence.LOADED, Residence.LOADED)

    world = World(RULES, needs("a", 4, parked=4, floor=5), needs("b", 12, floor=4), can_park=True)
    world.ask("a")
    world.run(40)
    world.ask("b")
    world.run(20)
    assert (world["a"].state, world["b"].state) == (Residence.PARKED, Residence.LOADED)
    world.ask("a")
    world.run(60)
    assert (world["a"].num_loads, world["a"].num_served) == (2, 2)


def test_an_idle_model_leaves_if_idle_models_are_to() -> None:
    world = World(Rules(20 * GIB, idle_s=60.0), needs("a", 5))
    world.ask("a", takes_s=20)
    world.run(60)
    assert world.state("a") is Residence.LOADED
    world.run(60)
    assert world.state("a") is Residence.UNLOADED


def test_a_wait_says_how_long_until_memory_may_be_taken() -> None:
    world = World(RULES, needs("a", 15), needs("b", 15))
    world.ask("a")
    world.run(6)
    world.ask("b")
    world.step()
    wait_s = world.aims["b"].wait_s
    assert wait_s == pytest.approx(30 - (world.now - world["a"].loaded_at))


sizes = st.lists(st.tuples(st.integers(1, 14), st.integers(1, 6), st.integers(0, 8)), min_size=2, max_size=5)
events = st.lists(
    st.tuples(
        st.integers(1, 25),  # seconds until it
        st.integers(0, 4),  # of which model
        st.sampled_from(["ask"] * 6 + ["load", "unload", "park", "pin", "unpin"]),
        st.integers(1, 60),
    ),
    max_size=40,
)


@given(sizes, events, st.booleans(), st.sampled_from([0.0, 10.0, 40.0]), st.sampled_from([None, 30.0]), st.booleans())
def test_whatever_is_asked_nothing_is_cut_and_all_that_fits_is_served(
    shapes: list[tuple[int, int, int]],
    happening: list[tuple[int, int, str, int]],
    can_park: bool,
    min_residence_s: float,
    idle_s: float | None,
    one_at_a_time: bool,
) -> None:
    rules = Rules(20 * GIB, min_residence_s=min_residence_s, idle_s=idle_s, one_at_a_time=one_at_a_time)
    models = [
        needs(f"m{index}", fixed, floor, most=10, parked=min(parked, fixed))
        for index, (fixed, floor, parked) in enumerate(shapes)
    ]
    world = World(rules, *models, can_park=can_park)
    for seconds, index, what, takes_s in happening:
        model = world[f"m{index % len(models)}"]
        if what == "ask":
            world.ask(model.needs.name, takes_s)
        elif what in ("pin", "unpin"):
            model.pinned = what == "pin"
        else:
            model.wish = Wish(what)
        world.run(seconds)
    for model in world.models.values():  # then no order stands in the way
        model.pinned, model.wish = False, Wish.NONE
    world.run(200)
    for model in world.models.values():
        assert not model.waiting, f"{model.needs.name} waits for ever"
    last = list(world.models.values())[-1]
    served = last.num_served
    world.ask(last.needs.name)
    world.run(200)
    assert last.num_served == served + 1 or "too little" in last.was_refused or last.needs.least_bytes > 20 * GIB
    if last.needs.least_bytes <= 20 * GIB:
        assert last.num_served == served + 1


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20)), min_size=20, max_size=80), st.integers(5, 40))
def test_a_model_is_loaded_no_more_often_than_the_minimum_residence_allows(
    asked: list[tuple[int, int]], min_residence_s: int
) -> None:
    world = World(Rules(20 * GIB, min_residence_s=min_residence_s), *(needs(name, 12) for name in "abc"))
    for index, takes_s in asked:
        world.ask("abc"[index], takes_s)
        world.run(3)
    seconds = 3 * len(asked)
    assert len(world.history) <= seconds / min_residence_s + 1
