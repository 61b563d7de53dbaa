"""Every family on a GPU, in overlapped steps and captured graphs: each token is one that the float32 reference on the
CPU might have chosen."""

from __future__ import annotations

import random

import pytest

from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.model.random_weights import RandomCheckpoint
from tests.devices import NEEDS_GPU
from tests.model.family_configs import CONFIGS
from tests.runner.clients import Clients, one_after_the_other, serve
from tests.runner.devices import assembled
from tests.runner.judge import Judge


def requests() -> list[Request]:
    """More at a time than the kernels for a few rows take, then fewer and fewer."""
    source = random.Random(3)
    shared = source.choices(range(400), k=40)
    return [
        Request(
            id=f"r{i}",
            prompt_ids=shared[: source.choice([0, 16, 40])] + source.choices(range(400), k=source.randint(1, 80)),
            max_tokens=2 + 2 * i,
            sampling=SamplingParams(temperature=0.0, num_logprobs=2),
        )
        for i in range(22)
    ]


@NEEDS_GPU
@pytest.mark.parametrize("family", list(CONFIGS))
def test_every_token_is_the_references(family: str) -> None:
    config = CONFIGS[family]
    made = assembled(config, "cuda", block_size=16, max_num_seqs=24)
    clients = Clients(one_after_the_other(requests(), apart=0))
    serve(made, clients, num_blocks=400)
    assert len(clients.finished) == len(requests())
    undecided = Judge(RandomCheckpoint(config), longest=config.context_length).check_all(clients)
    assert undecided <= 0.02 * clients.measured.totals.generated_tokens, "the rule forgives too much"


@pytest.mark.parametrize("device", ["cpu-overlapped", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe"])
def test_every_token_is_counted_once_for_each_of_its_experts(family: str, device: str) -> None:
    """Padding is not among them: batches shrink through all sizes of captured graphs."""
    config = CONFIGS[family]
    assert config.experts is not None
    made = assembled(config, device, block_size=16, max_num_seqs=24)
    assert made.experts is not None
    before = made.experts.load().num_tokens
    clients = Clients(one_after_the_other(requests()[::3], apart=0))
    serve(made, clients, num_blocks=made.size.num_blocks)
    load = made.experts.load()
    answers = clients.finished.values()
    computed = sum(len(a.request.prompt_ids) - a.cached_tokens + len(a.token_ids) - 1 for a in answers)
    assert load.num_tokens - before == computed * config.experts.per_token * len(load.layers)
