from __future__ import annotations

import msgspec
from msgspec.structs import replace

from penstock.core.replica import ReplicaSnapshot
from penstock.gateway.records.decisions import Decided, decided
from penstock.replay.policy import OtherPolicy, Shown, as_recorded, recorded_choice
from penstock.replay.world import World
from penstock.router.explanation import route_header
from penstock.router.router import Router
from penstock.router.strategies import RoutingSettings, StrategyName
from tests.replay.past import BLOCK, replica, request

CHAIN = tuple(range(8))
NOW = 1000.0
STEP = 2048


def shown(*replicas: ReplicaSnapshot, full: dict[str, str] | None = None, prompt: int = 400) -> Shown:
    return Shown(request("q", prompt, random01=0.3), replicas, {}, full or {})


def other(strategy: StrategyName = "least_connections") -> tuple[OtherPolicy, World]:
    policy = OtherPolicy(RoutingSettings(strategy), carries=True)
    assert policy.world is not None
    return policy, policy.world


def names(of: Shown) -> list[str]:
    return [one.id for one in of.replicas]


def test_a_choice_is_shown_again_as_it_was_made() -> None:
    router = Router()
    router.index.reset("b", CHAIN[:3])
    wanted = request("q", 2000, CHAIN[:7], random01=0.625, session="somebody")
    full = [replica(name, taken_at=NOW, chunk_tokens=512, num_running=i) for i, name in enumerate("abc")]
    choice = router.pick_among(wanted, full[:2], NOW, {"c": "prefill", "d": "breaker_open"})
    entry = decided(NOW + 0.5, wanted, choice, NOW, "m", "", "")
    entry = msgspec.msgpack.decode(msgspec.msgpack.encode(entry), type=Decided)
    found = as_recorded(entry)
    assert (found.request.random01, found.matched, found.full) == (0.625, {"b": 3}, {"c": "prefill"})
    assert [(one.limits.chunk_tokens, one.load.num_running) for one in found.replicas] == [(512, 0), (512, 1)]
    assert found.request.session not in (None, "somebody")
    assert found.missing_tokens(found.replicas[1]) == 2000 - 3 * BLOCK
    assert route_header(recorded_choice(entry, found)) == route_header(choice)


def test_what_was_in_host_memory_is_shown_again_too() -> None:
    router = Router()
    router.index.reset("a", CHAIN[:2])
    router.index.reset("b", CHAIN[:1])
    router.index.stored_on_host("b", CHAIN[1:5])
    wanted = request("q", 2000, CHAIN[:7], random01=0.625)
    for share, winner in ((0.1, "b"), (1.0, "a")):
        fleet = [replica(name, taken_at=NOW, host_share=share) for name in "ab"]
        choice = router.pick_among(wanted, fleet, NOW, {})
        entry = decided(NOW, wanted, choice, NOW, "m", "", "")
        found = as_recorded(msgspec.msgpack.decode(msgspec.msgpack.encode(entry), type=Decided))
        assert (found.matched, found.on_host) == ({"a": 2, "b": 5}, {"b": 4})
        assert found.missing_tokens(found.replicas[1]) == 2000 - 5 * BLOCK + int(share * 4 * BLOCK)
        again = OtherPolicy(RoutingSettings()).choose(found, {}, NOW)
        assert again.replica is not None
        assert again.replica.id == winner == entry.picked
        assert route_header(recorded_choice(entry, found)) == route_header(choice) == route_header(again)


def test_a_log_from_before_draws_were_kept_still_has_chance_in_it() -> None:
    draws = set()
    for number in range(5):
        wanted = request(f"q{number}")
        choice = Router().pick_among(wanted, [replica("a")], NOW, {})
        draws.add(as_recorded(decided(NOW, wanted, choice, NOW, "m", "", "")).request.random01)
    assert len(draws) == 5


def test_where_nothing_differs_nothing_is_changed() -> None:
    policy, _ = other()
    was = shown(replica("a", num_waiting=300, queued_tokens=9000), replica("b"), full={"c": "prefill"})
    assert policy.shown(was, World(), NOW).replicas == list(was.replicas)


def test_who_would_have_more_to_do_than_it_takes_is_no_candidate() -> None:
    policy, world = other()
    world.sent(request("p", 3 * STEP), replica("a"), 3 * STEP, NOW)
    found = policy.shown(shown(replica("a"), replica("b")), World(), NOW)
    assert names(found) == ["b"]


def test_who_had_no_room_may_have_it() -> None:
    policy, _ = other()
    as_it_was = World()
    policy.shown(shown(replica("a"), replica("b")), as_it_was, NOW - 1)  # so that both are known
    as_it_was.sent(request("p", 3 * STEP), replica("a"), 3 * STEP, NOW)  # and this went elsewhere
    found = policy.shown(shown(replica("b", num_waiting=1), full={"a": "prefill"}), as_it_was, NOW)
    assert names(found) == ["b", "a"]
    assert found.replicas[1].prefill_queued == 0
    choice = policy.choose(found, {"a": "prefill", "x": "not_ready"}, NOW)
    assert choice.replica is not None
    assert (choice.replica.id, choice.dropped) == ("a", {"x": "not_ready"})


def test_whose_places_or_cache_were_full_has_room_when_somebody_is_not_there() -> None:
    for why in ("sequences", "kv"):
        policy, _ = other()
        as_it_was, small = World(), replica("a", max_num_seqs=4, kv_capacity_tokens=2000)
        policy.shown(shown(small, replica("b")), as_it_was, NOW - 1)
        assert names(policy.shown(shown(replica("b"), full={"a": why}), as_it_was, NOW)) == ["b"]
        as_it_was.sent(request("p", 1000), small, 0, NOW)
        assert names(policy.shown(shown(replica("b"), full={"a": why}), as_it_was, NOW)) == ["b", "a"]


def test_with_no_room_anywhere_it_waits_for_the_first_that_has() -> None:
    policy, world = other("round_robin")
    for name, tokens in (("a", 9 * STEP), ("b", 5 * STEP)):
        world.sent(request(name, tokens), replica(name), tokens, NOW)
    found = policy.shown(shown(replica("a"), replica("b")), World(), NOW)
    assert names(found) == ["b"]
    assert found.replicas[0].queue_s > 5.0


def test_a_match_lets_wait_where_the_strategy_goes_by_matches() -> None:
    for strategy, expected in (("kv_aware", ["a", "b"]), ("round_robin", ["b"])):
        policy, world = other(strategy)  # type: ignore[arg-type]
        world.sent(request("p", 2100), replica("a"), STEP + 52, NOW)
        wanted = replace(request("q", 2100, CHAIN), random01=0.1)
        was = Shown(wanted, [replica("a"), replica("b")], {"a": 4})
        assert names(policy.shown(was, World(), NOW)) == expected
