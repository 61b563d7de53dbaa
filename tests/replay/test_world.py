import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.replay.world import Load, World
from tests.replay.past import BLOCK, replica, request

FAST = replica("a", prefill_tokens_per_s=1000.0)


def test_prompts_run_off_at_the_replicas_speed() -> None:
    world = World()
    world.sent(request("q", 1500), FAST, 1000, now=10.0)
    assert world.load(FAST, 10.0) == Load(1, 1000, 1550)
    assert world.load(FAST, 10.4).prefill_tokens == 600
    assert world.load(FAST, 99.0) == Load(1, 0, 1550)


def test_who_has_left_has_nothing_to_compute() -> None:
    world = World()
    world.sent(request("q", 3000), FAST, 3000, now=10.0)
    world.sent(request("p", 200), FAST, 200, now=10.0)
    world.ended("q")
    assert world.load(FAST, 10.0) == Load(1, 200, 250)


def test_who_is_sent_on_is_in_one_place() -> None:
    world = World()
    world.sent(request("q"), FAST, 0, now=10.0)
    world.sent(request("q"), replica("b"), 0, now=11.0)
    assert world.load(FAST, 11.0) == Load()
    assert world.load(replica("b"), 11.0).sequences == 1


def test_a_replica_holds_what_it_was_sent_as_much_as_fits() -> None:
    small = replica("a", kv_capacity_tokens=3 * BLOCK)
    world = World()
    world.sent(request("q", chain=(1, 2, 3)), small, 0, now=1.0)
    assert world.held(request("again", chain=(1, 2, 9)), [small, replica("b")]) == {"a": 2}
    world.sent(request("p", chain=(7, 8)), small, 0, now=2.0)
    assert world.held(request("again", chain=(1, 2, 3)), [small]) == {"a": 1}


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 2), st.integers(1, 5000), st.booleans(), st.floats(0, 2)),
        max_size=40,
    )
)
def test_nothing_is_left_when_all_have_ended(steps: list[tuple[int, int, int, bool, float]]) -> None:
    world, replicas, now = World(), [replica(f"r{i}") for i in range(3)], 0.0
    for number, where, prompt, is_end, wait_s in steps:
        now += wait_s
        if is_end:
            world.ended(f"q{number}")
        else:
            world.sent(request(f"q{number}", prompt), replicas[where], prompt // 2, now)
        for one in replicas:
            assert min(world.load(one, now)) >= 0
    for number in range(10):
        world.ended(f"q{number}")
    assert [world.load(one, now) for one in replicas] == [Load()] * 3


@pytest.mark.parametrize("later_s", [0.0, 0.5, 5.0])
def test_of_two_that_were_fed_the_same_nothing_differs(later_s: float) -> None:
    worlds = World(), World()
    for world in worlds:
        world.sent(request("q", 900), FAST, 800, now=1.0)
        world.sent(request("p", 700), FAST, 700, now=1.3)
    one, other = (world.load(FAST, 1.3 + later_s) for world in worlds)
    assert one == other
