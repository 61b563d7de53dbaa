from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.engine import workload as engine_workload
from penstock.bench.workloads import WORKLOADS, Workload, choose, make_prompts
from penstock.core.errors import ConfigError
from penstock.hub.resolve import resolve
from penstock.text.tokenizer import Tokenizer
from penstock.workload.words import single_token_words

CPU_WORKLOADS = WORKLOADS["cpu"]
WORDS = [f" word{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]


@given(own=st.integers(1, 20), shared=st.integers(0, 20), num_requests=st.integers(1, 5), seed=st.text(max_size=5))
def test_every_prompt_has_its_tokens_and_begins_with_the_shared_ones(
    own: int, shared: int, num_requests: int, seed: str
) -> None:
    workload = Workload("w", own + shared, 1, 1, num_requests, shared_tokens=shared)
    prompts = [prompt.split() for prompt in make_prompts(workload, WORDS, seed)]
    assert [len(prompt) for prompt in prompts] == [own + shared] * num_requests
    assert all(prompt[:shared] == prompts[0][:shared] for prompt in prompts)


def test_the_same_seed_asks_every_server_the_same() -> None:
    prefix = CPU_WORKLOADS["prefix"]
    assert make_prompts(prefix, WORDS, "1") == make_prompts(prefix, WORDS, "1")


def test_a_new_seed_changes_the_shared_beginning_too() -> None:
    prefix = CPU_WORKLOADS["prefix"]
    old, new = (make_prompts(prefix, WORDS, seed)[0].split() for seed in "12")
    assert old[:16] != new[:16]


def test_requests_of_one_round_do_not_share_what_is_their_own() -> None:
    prompts = make_prompts(CPU_WORKLOADS["c8"], WORDS, "1")
    assert len({prompt[:50] for prompt in prompts}) == len(prompts)


def test_workloads_are_chosen_by_name_in_the_order_given() -> None:
    assert [workload.name for workload in choose("c32,decode1", CPU_WORKLOADS)] == ["c32", "decode1"]
    assert [workload.name for workload in choose(None, CPU_WORKLOADS)] == ["decode1", "c8", "c32", "prefix"]


def test_a_gpus_workloads_are_those_of_the_engine_alone() -> None:
    for workload in WORKLOADS["http"].values():
        alone = engine_workload(workload.name, None)
        assert alone.lengths == [(workload.prompt_tokens, workload.output_tokens)] * workload.num_requests
        assert alone.shared == workload.shared_tokens
        assert workload.concurrency == workload.num_requests


def test_an_unknown_workload_is_told_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'c9'; there are decode1, c8, c32, prefix"):
        choose("c8,c9", CPU_WORKLOADS)


@pytest.mark.slow
def test_a_prompt_for_smollm2_is_exactly_as_many_tokens_as_asked() -> None:
    tokenizer = Tokenizer.load(resolve("smollm2").tokenizer_source)
    words = single_token_words(tokenizer)
    assert len(words) > 10_000
    for workload in CPU_WORKLOADS.values():
        encoded = tokenizer.encode_batch(make_prompts(workload, words, "1"), add_special_tokens=True)
        assert {len(ids) for ids in encoded} == {workload.prompt_tokens}
