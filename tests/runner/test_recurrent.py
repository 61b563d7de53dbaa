"""Recurrent states in the engine's own loop, with steps that are planned before the last one is read: each token is one
that the reference might have chosen."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from penstock.core.guide import Guide
from penstock.core.model_config import ModelConfig
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.model.random_weights import RandomCheckpoint
from tests.equality.reference import MARGIN
from tests.model.family_configs import CONFIGS
from tests.runner.clients import Clients, one_after_the_other, serve
from tests.runner.devices import assembled
from tests.runner.judge import Judge
from tests.runner.turns import TurnGuides, follows

CONFIG: ModelConfig = replace(CONFIGS["qwen3.5"], num_layers=2, linear=replace(CONFIGS["qwen3.5"].linear, layers=(0,)))
GREEDY = SamplingParams(temperature=0.0)


def requests(*, stops: bool) -> list[Request]:
    """`stops`: some end by a token that nobody expects, while the next step is under way."""
    source = random.Random(11)
    shared = source.choices(range(CONFIG.vocab_size), k=24)
    return [
        Request(
            f"r{i}",
            shared[: source.choice([0, 12, 24])] + source.choices(range(CONFIG.vocab_size), k=source.randint(1, 30)),
            source.randint(10, 30),
            GREEDY,
            stop_token_ids=source.choices(range(CONFIG.vocab_size), k=10) if stops else [],
        )
        for i in range(16)
    ]


@pytest.mark.parametrize("device", ["cpu", "cpu-overlapped"])
def test_every_token_is_the_references(device: str) -> None:
    made = assembled(CONFIG, device, block_size=4, max_num_seqs=5, chunk_tokens=16)
    clients = Clients(one_after_the_other(requests(stops=True), apart=1))
    serve(made, clients, num_blocks=22)  # too few for all that is open
    assert clients.measured.totals.preemptions > 0
    assert clients.measured.cache.cached_tokens > 0
    Judge(RandomCheckpoint(CONFIG), longest=96).check_all(clients)


@pytest.mark.parametrize("device", ["cpu", "cpu-overlapped"])
def test_forced_tokens_leave_the_state_that_they_would_have_left_chosen(device: str) -> None:
    """What comes after a forced token is chosen by all that came before it, as the reference would."""
    made = assembled(CONFIG, device, block_size=4, max_num_seqs=5, chunk_tokens=16)
    guided = [guided_like(request) for request in requests(stops=False)[:8]]
    clients = Clients(one_after_the_other(guided, apart=1))
    serve(made, clients, num_blocks=64, guides=TurnGuides(CONFIG.vocab_size))
    assert clients.measured.totals.forced_tokens == 8
    judge = Judge(RandomCheckpoint(CONFIG), longest=96)
    for answer in clients.finished.values():
        logits = judge.logits(answer.request.prompt_ids, answer.token_ids)
        for place, (token, row) in enumerate(zip(answer.token_ids, logits, strict=True)):
            allowed = [float(row[each]) for each in range(CONFIG.vocab_size) if follows(each, place)]
            assert float(row[token]) >= max(allowed) - MARGIN, f"{answer.request.id}, place {place}"


def guided_like(request: Request) -> Request:
    return Request(request.id, request.prompt_ids, 16, GREEDY, guide=Guide("regex", "as TurnGuide has it"))


def test_a_parked_engine_keeps_no_state_and_needs_none() -> None:
    made = assembled(CONFIG, "cpu", block_size=4, max_num_seqs=5, chunk_tokens=16)
    assert made.memory is not None
    for _ in range(2):
        clients = Clients(one_after_the_other(requests(stops=False)[:4], apart=1))
        serve(made, clients, num_blocks=64)
        Judge(RandomCheckpoint(CONFIG), longest=96).check_all(clients)
        made.memory.park()
        made.memory.wake()
