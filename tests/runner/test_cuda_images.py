"""Models that take images, in overlapped steps, and on a GPU in captured graphs: each token is one that the float32
reference on the CPU might have chosen."""

from __future__ import annotations

import pytest

from penstock.model.random_weights import RandomCheckpoint
from tests.devices import NEEDS_GPU
from tests.runner.clients import Clients, one_after_the_other, serve
from tests.runner.devices import assembled
from tests.runner.seeing import CONFIGS, SeeingJudge, requests


@pytest.mark.parametrize("device", ["cpu", "cpu-overlapped", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("family", list(CONFIGS))
def test_every_token_is_the_references(family: str, device: str) -> None:
    config = CONFIGS[family]
    block_size = 16 if device == "cuda" else 4
    made = assembled(
        config, device, block_size=block_size, max_num_seqs=8, chunk_tokens=24, max_image_tokens=40, max_loras=0
    )
    clients = Clients(one_after_the_other(requests(config), apart=2))
    serve(made, clients, num_blocks=24 if device == "cuda" else 40, vision=config.vision)
    assert len(clients.finished) == len(requests(config))
    assert clients.measured.cache.cached_tokens > 0
    SeeingJudge(RandomCheckpoint(config), longest=config.context_length).check_all(clients)
