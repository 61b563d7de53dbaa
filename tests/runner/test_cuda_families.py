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
