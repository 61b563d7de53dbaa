"""Prefixes of models with a recurrent state: a prompt goes on from a snapshot, and says what it would say alone."""

from __future__ import annotations

import pytest

from penstock.model.loading import load_model
from tests.equality.test_families import SHARED, TOKENS, Pair, greedy, make_ops
from tests.model.tiny import StateDictCheckpoint, hf_model


@pytest.fixture(scope="module", params=[pytest.param("reference", marks=pytest.mark.slow), "native"])
def pair(request: pytest.FixtureRequest) -> Pair:
    theirs, ops = hf_model("qwen3.5"), make_ops(request.param)
    return Pair(theirs, load_model(StateDictCheckpoint(theirs), ops), ops)


def test_second_turn_goes_on_where_the_first_prompt_ended(pair: Pair) -> None:
    engine = pair.engine()
    first = greedy("first", SHARED, 11)
    engine.run(first)
    second = greedy("second", [*SHARED, *engine.outputs["first"], *TOKENS[:6]])
    engine.run(second)
    assert engine.cached["second"] == 28, "the last whole block of the first prompt"
    pair.check(engine, first, second)


def test_prompts_part_where_the_second_of_them_has_left_a_snapshot(pair: Pair) -> None:
    engine = pair.engine(chunk_tokens=9)
    requests = [greedy(f"r{i}", [*SHARED[:18], *TOKENS[20 * i : 20 * i + 13]]) for i in range(4)]
    engine.run(*requests, apart=20)
    assert [engine.cached[request.id] for request in requests] == [0, 0, 16, 16]
    pair.check(engine, *requests)


def test_siblings_and_what_is_evicted_meanwhile(pair: Pair) -> None:
    """Six prompts, each asked twice, and room for four snapshots."""
    engine = pair.engine(num_blocks=40, chunk_tokens=13, max_num_seqs=3)
    requests = [greedy(f"r{i}", TOKENS[9 * (i % 6) : 9 * (i % 6) + 21], 5) for i in range(12)]
    engine.run(*requests, apart=1)
    assert engine.cache.states is not None
    assert len(engine.cache.states._snapshots) == 4
    pair.check(engine, *requests)


def test_preempted_sequence_goes_on_from_its_own_prompt(pair: Pair) -> None:
    engine = pair.engine(num_blocks=14, chunk_tokens=16)
    requests = [greedy("a", TOKENS[:21], 20), greedy("b", TOKENS[30:47], 20), greedy("c", TOKENS[50:54], 30)]
    engine.run(*requests)
    assert engine.preemptions > 0
    assert engine.scheduler.counters.recomputed_tokens < 60
    pair.check(engine, *requests)


def test_namespaces_share_no_state(pair: Pair) -> None:
    engine = pair.engine()
    requests = [greedy(name, SHARED, namespace=name) for name in ("", "acme", "")]
    requests[2] = greedy("again", SHARED)
    engine.run(*requests, apart=20)
    assert [engine.cached[request.id] for request in requests] == [0, 0, 28]
    pair.check(engine, *requests)
