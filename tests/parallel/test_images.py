"""Models that take images over two ranks: each has the whole encoder, and a part of the decoder."""

from __future__ import annotations

import pytest

from penstock.model.random_weights import RandomCheckpoint
from tests.runner.clients import Clients, one_after_the_other, serve
from tests.runner.devices import assembled, end_ranks
from tests.runner.seeing import CONFIGS, SeeingJudge, requests


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"),
    [("idefics3", "tp=2"), ("qwen2.5-vl", "tp=2"), ("qwen2.5-vl", "tp=2 sp=2"), ("qwen3-vl", "tp=2")],
)
def test_every_token_is_the_references(family: str, layout: str) -> None:
    config = CONFIGS[family]
    block_size = 2 if "sp" in layout else 4
    made = assembled.__wrapped__(  # of its own: nobody else has these ranks
        config,
        f"cpu {layout}",
        block_size=block_size,
        max_num_seqs=8,
        chunk_tokens=24,
        max_image_tokens=40,
        max_loras=0,
    )
    clients = Clients(one_after_the_other(requests(config, 8), apart=2))
    serve(made, clients, num_blocks=40, vision=config.vision)
    end_ranks(made)
    assert len(clients.finished) == 8
    SeeingJudge(RandomCheckpoint(config), longest=config.context_length).check_all(clients)


@pytest.mark.slow
def test_over_pipeline_stages_no_images_are_taken() -> None:
    made = assembled.__wrapped__(CONFIGS["qwen2.5-vl"], "cpu pp=2", block_size=4, max_loras=0)
    text = [request for request in requests(CONFIGS["qwen2.5-vl"], 10) if not request.images]
    clients = Clients(one_after_the_other(text, apart=2))
    serve(made, clients, num_blocks=40)
    end_ranks(made)
    assert made.limits.image_tokens == 0
    SeeingJudge(RandomCheckpoint(CONFIGS["qwen2.5-vl"]), longest=256).check_all(clients)
