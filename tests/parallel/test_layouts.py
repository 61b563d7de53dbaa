"""Models over several ranks, which are processes of their own: every token is one that the reference might have chosen.

`make test` tries each family and each layout at least once; `make test-parallel` tries all of them with all of them.
Sequences share prefixes, are preempted for want of blocks, and come and go while others decode.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from penstock.core.model_config import ModelConfig
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.model.random_weights import RandomCheckpoint
from penstock.runner.assemble import Assembly
from tests.model.family_configs import CONFIGS, MORE_CONFIGS, SHAPE
from tests.runner.clients import Clients, one_after_the_other, serve
from tests.runner.devices import assembled, end_ranks
from tests.runner.judge import Judge

FAMILIES: dict[str, ModelConfig] = {
    "llama": SHAPE,
    "llama, tied and biased": replace(SHAPE, tied_embeddings=True, attention_bias=True, output_bias=True),
    "llama, three heads of keys": replace(SHAPE, num_heads=6, num_kv_heads=3),
    "mistral": replace(SHAPE, architecture="mistral", windows=(10, 10)),
    "qwen2": replace(SHAPE, architecture="qwen2", attention_bias=True),
    "qwen3": replace(SHAPE, architecture="qwen3", tied_embeddings=True),
    **CONFIGS,
    **MORE_CONFIGS,
}
LAYOUTS = ["tp=2", "tp=4", "pp=2", "tp=2 pp=2", "tp=2 ep=2", "tp=2 pp=2 ep=2"]
LAYOUTS += ["tp=2 sp=2", "tp=4 sp=2", "tp=4 sp=4", "tp=2 pp=2 sp=2", "tp=2 ep=2 sp=2"]
SELECTED = [
    ("llama", "tp=4"),
    ("llama, tied and biased", "tp=2 pp=2"),
    ("llama, three heads of keys", "tp=2"),
    ("qwen3", "pp=2"),
    ("gemma2", "tp=2 pp=2"),
    ("phi3", "tp=2"),
    ("mixtral", "tp=2 pp=2 ep=2"),
    ("qwen2-moe", "tp=2 ep=2"),
    ("deepseek-v2", "tp=2 pp=2"),
    ("deepseek-v3", "tp=2"),
    ("deepseek-v3", "tp=2 ep=2"),
    ("llama, tied and biased", "tp=4 sp=2"),
    ("llama, three heads of keys", "tp=2 sp=2"),
    ("gemma2", "tp=4 sp=4"),
    ("mistral", "tp=2 pp=2 sp=2"),
    ("qwen3-moe", "tp=2 ep=2 sp=2"),
    ("llama4", "tp=2 pp=2 ep=2"),
    ("olmo3", "tp=2 pp=2"),
    ("minimax-m2", "tp=2 ep=2 sp=2"),
    ("qwen3-next", "tp=2 ep=2"),
    ("qwen3.5", "tp=2 pp=2"),
    ("smollm3", "tp=2"),
    ("seed-oss", "tp=2"),
    ("ernie4.5", "tp=2"),
    ("exaone4", "tp=2"),
    ("ministral3", "tp=2"),
    ("dots1", "tp=2 ep=2"),
]
NUM_BLOCKS = 16  # too few for all that is open


def is_possible(family: str, layout: str) -> bool:
    if "ep" in layout and FAMILIES[family].experts is None:
        return False
    if "sp" in layout and (FAMILIES[family].latent is not None or FAMILIES[family].linear is not None):
        return False
    return not (family == "llama, three heads of keys" and "tp=4" in layout)


def requests(config: ModelConfig) -> list[Request]:
    source = random.Random(7)
    shared = source.choices(range(config.vocab_size), k=12)
    kinds = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_p=0.9, seed=5)]
    return [
        Request(
            f"r{number}",
            shared[: source.choice([0, 8, 12])] + source.choices(range(config.vocab_size), k=source.randint(1, 12)),
            source.randint(4, 16),
            kinds[number % 2],
        )
        for number in range(12)
    ]


def served(config: ModelConfig, device: str, *, num_blocks: int) -> Clients:
    """All requests, on these ranks, and every token held to the reference."""
    sp = int(device.partition("sp=")[2] or 1)
    block_size = (
        4 // sp if device.startswith("cpu") else 16
    )  # of a rank's part; all parts are one block of the scheduler
    made = assembled.__wrapped__  # of its own: there are too many to keep all of them
    assembly: Assembly = made(config, device, block_size=block_size, max_num_seqs=6, chunk_tokens=16)
    clients = Clients(one_after_the_other(requests(config), apart=2))
    serve(assembly, clients, num_blocks=num_blocks if device.startswith("cpu") else num_blocks // sp)
    if device.startswith("cpu"):  # those on a GPU end with their process
        end_ranks(assembly)
    assert len(clients.finished) == 12
    Judge(RandomCheckpoint(config), longest=64, device=assembly.device.name).check_all(clients)
    return clients


@pytest.mark.parametrize(
    ("family", "layout"),
    [pytest.param(*pair, marks=pytest.mark.slow) for pair in SELECTED]
    + [
        pytest.param(family, layout, marks=[pytest.mark.slow, pytest.mark.drill])
        for family in FAMILIES
        for layout in LAYOUTS
        if is_possible(family, layout) and (family, layout) not in SELECTED
    ],
)
def test_every_token_is_the_references(family: str, layout: str) -> None:
    clients = served(FAMILIES[family], f"cpu {layout}", num_blocks=NUM_BLOCKS)
    assert clients.measured.totals.preemptions > 0
    assert clients.measured.cache.cached_tokens > 0
