from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from penstock.core.config import build
from penstock.core.errors import ConfigError
from penstock.core.replica import ReplicaSnapshot
from penstock.core.request import Priority
from penstock.router.explanation import replica_header, route_header
from penstock.router.load import Load
from penstock.router.prefix_index import PrefixIndex
from penstock.router.request import EdgeRequest
from penstock.router.router import Router
from penstock.router.scorers import by_load, by_prefix
from penstock.router.strategies import STRATEGIES, RoutingSettings, StrategyName, Weights
from tests.snapshots import snapshot

CHAIN = tuple(range(1, 33))  # 8,192 tokens
SPEED = 8000.0  # tokens of prompts per second


def replica(name: str, **facts: Any) -> ReplicaSnapshot:
    return snapshot(id=name, models=("m",), prefill_tokens_per_s=SPEED, **facts)


def request(**facts: Any) -> EdgeRequest:
    return EdgeRequest("q", "m", **{"prompt_tokens": 8200, "max_tokens": 100, **facts})


def router(strategy: StrategyName = "kv_aware", **weights: Any) -> Router:
    return Router.from_settings(RoutingSettings(strategy, Weights(**weights)), {})


def picks(route: Router, replicas: list[ReplicaSnapshot], count: int, **facts: Any) -> Counter[str]:
    counts: Counter[str] = Counter()
    for i in range(count):
        asked = request(random01=i / count, **facts)
        choice = route.pick(asked, replicas, 0.0)
        route.routed(asked, choice, 0.0)
        assert choice.replica is not None
        counts[choice.replica.id] += 1
    return counts


# -- in turn, by connections, by weights


def test_round_robin_takes_turns_whoever_is_a_candidate() -> None:
    route = router("round_robin")
    a, b, c = map(replica, "abc")
    assert picks(route, [a, b, c], 9) == {"a": 3, "b": 3, "c": 3}
    assert picks(route, [a, b], 6) == {"a": 3, "b": 3}
    assert picks(route, [a, b, c], 9)["c"] <= 4  # who was away has nothing to catch up


def test_weighted_turns_follow_the_observed_speed() -> None:
    fast = ReplicaSnapshot(id="fast", models=("m",), prefill_tokens_per_s=6000.0, decode_tokens_per_s=6000.0)
    slow = ReplicaSnapshot(id="slow", models=("m",), prefill_tokens_per_s=2000.0, decode_tokens_per_s=2000.0)
    assert picks(router("weighted"), [slow, fast], 40) == {"fast": 30, "slow": 10}


def test_least_connections_counts_sequences_and_nothing_else() -> None:
    busy, free = replica("busy", num_running=3), replica("free", num_running=2, queued_tokens=10_000)
    assert picks(router("least_connections"), [busy, free], 10) == {"free": 10}


def test_power_of_two_never_takes_the_worst_and_not_always_the_best() -> None:
    replicas = [replica(name, queued_tokens=1000 * i) for i, name in enumerate("abcd")]
    counts = picks(router("power_of_two"), replicas, 1200)
    assert counts["a"] > counts["b"] > counts["c"] > counts["d"] == 0


def test_token_aware_counts_queued_prompts_and_decoding_apart() -> None:
    prefilling = replica("prefilling", queued_tokens=8000)
    decoding = replica("decoding", num_running=100, decode_tokens_per_s=1000.0)
    route = router("token_aware")
    assert picks(route, [prefilling, decoding], 4, prompt_tokens=10) == {"decoding": 4}
    # a long answer has more of the slow steps than a short one
    route = router("token_aware", load=Load(output=0.1))
    asked = {"prompt_tokens": 10, "max_tokens": 1000}
    assert picks(route, [prefilling, decoding], 4, **asked, expected_output=5) == {"decoding": 4}
    assert picks(route, [prefilling, decoding], 4, **asked, expected_output=900) == {"prefilling": 4}


def test_session_strategy_keeps_a_session_even_where_prompts_are_hashed() -> None:
    replicas = [replica(name) for name in "abcd"]
    assert len(picks(router("session"), replicas, 50, session="s", hashes=CHAIN)) == 1


# -- by what replicas hold


def test_the_replica_that_holds_the_prompt_is_picked_though_it_is_busier() -> None:
    route = router()
    route.index.reset("warm", CHAIN[:16])
    warm, cold = replica("warm", queued_tokens=3000), replica("cold")
    choice = route.pick(request(hashes=CHAIN), [cold, warm], 0.0)
    assert choice.replica is warm
    assert (choice.matched, choice.matched_tokens, choice.is_approximate) == ({"warm": 16}, 4096, False)
    assert choice.scores["prefix"][0] == 0.0


def test_a_hot_prefix_gets_a_second_home_when_its_replica_is_busy_for_longer_than_it_saves() -> None:
    route = router()
    route.index.reset("warm", CHAIN[:16])
    busy = replica("warm", queued_tokens=20_000)
    assert picks(route, [replica("cold"), busy], 1, hashes=CHAIN) == {"cold": 1}
    assert route.pick(request(hashes=CHAIN), [replica("cold"), busy], 0.0).matched == {"warm": 16, "cold": 32}


def test_a_prompt_that_nobody_holds_goes_by_load_and_equals_share() -> None:
    route = router()
    route.index.reset("a", range(1000, 3000))  # a large tree attracts nobody, and a small one neither
    counts = Counter[str]()
    for i in range(300):
        choice = route.pick(request(hashes=tuple(range(9000 + 40 * i, 9032 + 40 * i)), random01=i / 300), [*ABC], 0.0)
        counts[choice.replica.id if choice.replica else ""] += 1
    assert all(count == 100 for count in counts.values())
    busy_a = replica("a", queued_tokens=100)
    assert route.pick(request(hashes=(7, 8)), [busy_a, ABC[1]], 0.0).replica is ABC[1]


ABC = [replica(name) for name in "abc"]


@given(st.lists(st.integers(0, 50), min_size=2, max_size=12), st.floats(0, 1, exclude_max=True))
def test_of_equals_the_one_that_has_worked_least_is_picked(steps: list[int], random01: float) -> None:
    route = router()
    fleet = [replica(f"r{i}", steps=each) for i, each in enumerate(steps)]
    choice = route.pick(request(hashes=CHAIN, random01=random01), fleet, 0.0)
    assert choice.replica is not None
    assert choice.replica.load.steps == min(steps)


def test_siblings_of_a_burst_land_together_before_any_event() -> None:
    route = router()
    for name in "abc":
        route.index.reset(name, ())
    assert len(picks(route, ABC, 5, hashes=CHAIN)) == 1


def test_a_replica_that_publishes_nothing_is_believed_to_hold_what_it_was_sent() -> None:
    route = router()
    first = picks(route, ABC, 1, hashes=CHAIN)
    choice = route.pick(request(hashes=CHAIN, random01=0.9), ABC, 0.5)
    assert choice.replica is not None
    assert choice.replica.id in first
    assert choice.is_approximate
    assert ";matched=8192;approximate;" in route_header(choice)


def test_load_and_prefix_add_up_to_the_time_that_really_remains() -> None:
    index, load = PrefixIndex(), Load()
    index.reset("a", CHAIN[:8])
    busy = [replica("a", queued_tokens=5000, num_running=7)]
    asked = request(hashes=CHAIN)
    (prefix,) = by_prefix(index, load)(asked, busy) or []
    (loaded,) = by_load(load)(asked, busy)
    (shorter,) = by_load(load)(request(prompt_tokens=8200 - 8 * 256), busy)
    assert loaded + prefix == pytest.approx(shorter)


def test_a_session_is_a_guess_that_counts_where_the_prompt_is_not_known() -> None:
    route, replicas = router(), [replica(name) for name in "abcd"]
    assert len(picks(route, replicas, 50, session="s")) == 1
    home = next(iter(picks(route, replicas, 1, session="s")))
    busy = [replica(r.id, queued_tokens=100) if r.id == home else r for r in replicas]
    assert home in picks(route, busy, 10, session="s")
    assert home not in picks(route, busy, 10, session="s", hashes=CHAIN)


def test_high_priority_goes_to_the_least_loaded_and_low_is_spread_but_not_to_the_worst() -> None:
    route = router()
    loads = {"idle": 0, "near": 500, "busy": 20_000}
    replicas = [replica(name, queued_tokens=tokens) for name, tokens in loads.items()]
    asked: dict[str, Any] = {"prompt_tokens": 100}
    assert picks(route, replicas, 100, **asked, priority=Priority.HIGH) == {"idle": 100}
    assert picks(route, replicas, 100, **asked) == {"idle": 100}
    low = picks(route, replicas, 100, **asked, priority=Priority.LOW)
    assert low["near"] > 20
    assert low["busy"] == 0
    # a match that saves no more than the queue costs is for those who have time
    route.index.reset("near", CHAIN[:2])
    asked = {"prompt_tokens": 600, "hashes": CHAIN[:2]}
    assert picks(route, replicas, 1, **asked) == {"near": 1}
    assert picks(route, replicas, 1, **asked, priority=Priority.HIGH) == {"idle": 1}


def test_the_low_are_sent_somewhere_however_busy_all_are() -> None:
    replicas = [replica(name, queued_tokens=10**6, num_running=300) for name in "ab"]
    assert sum(picks(router(), replicas, 100, priority=Priority.LOW).values()) == 100


def test_of_very_many_the_holders_and_a_drawn_part_are_scored() -> None:
    route = router()
    replicas = [replica(f"r{i}", queued_tokens=0 if i != 500 else 100) for i in range(1000)]
    route.index.reset("r500", CHAIN)
    choice = route.pick(request(hashes=CHAIN), replicas, 0.0)
    assert choice.replica is replicas[500]
    assert len(choice.candidates) < 130
    others = picks(route, replicas, 200, hashes=(7, 8, 9), prompt_tokens=800)
    assert sum(others.values()) == 200


def test_each_model_may_have_its_own_strategy_and_weights() -> None:
    route = Router.from_settings(RoutingSettings("round_robin"), {"m": RoutingSettings("least_connections")})
    assert route.pick(request(), ABC, 0.0).strategy == "least_connections"
    other = [ReplicaSnapshot(id="x", models=("n",))]
    assert route.pick(EdgeRequest("q", "n", 1, 1), other, 0.0).strategy == "round_robin"


def test_settings_are_read_and_a_wrong_name_is_refused() -> None:
    settings = build(RoutingSettings, {"strategy": "kv_aware", "weights": {"prefix": 2, "load": {"queue": 0.5}}})
    assert settings.weights == Weights(prefix=2, load=Load(queue=0.5))
    with pytest.raises(ConfigError):
        build(RoutingSettings, {"strategy": "best"})


# -- what is said of a choice


def test_the_header_says_who_and_why_and_who_was_next() -> None:
    route = router()
    route.index.reset("a", CHAIN[:16])
    replicas = [*ABC, replica("gone", is_tripped=True)]
    choice = route.pick(request(hashes=CHAIN), replicas, 0.0)
    name, *parameters = route_header(choice).split(";")
    values = dict(one.partition("=")[::2] for one in parameters)
    assert name == "kv_aware"
    assert values["matched"] == "4096"
    assert values["of"] == "3"
    assert values["next"] in ('"b"', '"c"')
    assert values["dropped"] == '"breaker_open:1"'
    assert float(values["score"]) > float(values["next_score"]) > 0
    assert float(values["score"]) == pytest.approx(
        float(values["least_loaded"]) + Weights().prefix * float(values["prefix"]), rel=1e-3
    )
    assert "approximate" not in values
    assert replica_header(choice) == "a"
    assert route_header(route.pick(request(), [], 0.0)) == "kv_aware;of=0"


def test_a_strange_id_does_not_break_a_header() -> None:
    replicas = [replica('a"\r\nx: y'), replica("é")]
    for random01 in (0.0, 0.9):
        choice = router().pick(request(random01=random01), replicas, 0.0)
        for line in (route_header(choice), replica_header(choice)):
            assert line.isascii()
            assert line.isprintable()


@given(
    name=st.sampled_from(list(STRATEGIES)),
    random01=st.floats(0, 1, exclude_max=True),
    queues=st.lists(st.integers(0, 10**5), min_size=1, max_size=6),
    held=st.integers(0, 32),
    priority=st.sampled_from(Priority),
    session=st.none() | st.text(max_size=3),
    hashed=st.booleans(),
)
def test_every_strategy_picks_one_of_those_who_can_and_scores_in_range(
    name: StrategyName,
    random01: float,
    queues: list[int],
    held: int,
    priority: Priority,
    session: str | None,
    hashed: bool,
) -> None:
    route = router(name)
    replicas = [replica(f"r{i}", queued_tokens=queue) for i, queue in enumerate(queues)]
    route.index.reset("r0", CHAIN[:held])
    asked = request(random01=random01, priority=priority, session=session, hashes=CHAIN if hashed else ())
    for _ in range(2):
        choice = route.pick(asked, replicas, 0.0)
        assert choice.replica in replicas
        assert choice.strategy == name
        assert all(0.0 <= score <= 1.0 for scores in choice.scores.values() for score in scores)
        assert route_header(choice).startswith(name)
        route.routed(asked, choice, 0.0)


@given(st.integers(4, 12), st.integers(0, 30))
def test_a_replica_with_more_than_its_share_of_sequences_gains_nothing_by_its_cache(count: int, running: int) -> None:
    route = router()
    route.index.reset("r0", CHAIN)
    fleet = [replica(f"r{i}", num_running=running) for i in range(count)]
    assert picks(route, fleet, 1, hashes=CHAIN) == {"r0": 1}  # of equals, the one that holds the prompt
    crowded = replica("r0", num_running=3 * running + 12)
    assert "r0" not in picks(route, [crowded, *fleet[1:]], 1, hashes=CHAIN[:8], prompt_tokens=2100)


def test_a_hot_prefix_is_spread_before_the_answers_under_way_make_its_home_slow() -> None:
    """No prompt waits anywhere: only the sequences tell."""
    route = router()
    route.index.reset("warm", CHAIN)
    others = [replica(name, num_running=4) for name in "abc"]
    even, crowded = replica("warm", num_running=8), replica("warm", num_running=20)
    assert picks(route, [even, *others], 1, hashes=CHAIN) == {"warm": 1}
    assert "warm" not in picks(route, [crowded, *others], 1, hashes=CHAIN)
