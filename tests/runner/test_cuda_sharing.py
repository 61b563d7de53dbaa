"""Steps whose sequences share a prefix, in the engine's own loop on a GPU: every token is one that the reference might
have chosen, and the prefix was read once for all."""

from __future__ import annotations

import random

import pytest

from penstock.core.model_config import ModelConfig
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.model.random_weights import RandomCheckpoint
from penstock.runner.sharing import Ints, SharedViews, share
from tests.devices import NEEDS_GPU
from tests.runner.clients import Clients, one_after_the_other, serve
from tests.runner.devices import assembled
from tests.runner.judge import Judge

pytestmark = NEEDS_GPU

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=500,
    hidden_size=256,
    intermediate_size=512,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    context_length=2048,
)


def workload() -> list[Request]:
    """Most begin with the same thousand tokens, some of them with another thousand behind it, a few with nothing."""
    source = random.Random(0)
    system, examples = source.choices(range(500), k=1030), source.choices(range(500), k=500)
    requests = []
    for i in range(48):
        head = [system, system, system + examples, []][i % 4]
        prompt = head + source.choices(range(500), k=source.randint(1, 90))
        requests.append(Request(f"r{i}", prompt, source.randint(20, 70), SamplingParams(temperature=0.0)))
    return requests


@pytest.mark.parametrize("block_size", [16, 64])
def test_every_token_is_the_references(block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[bool] = []

    def heard(tables: Ints, positions: Ints, size: int, views: SharedViews) -> bool:
        answers.append(share(tables, positions, size, views))
        return answers[-1]

    monkeypatch.setattr("penstock.runner.cuda_runner.share", heard)
    assembly = assembled(CONFIG, "cuda", block_size=block_size, max_num_seqs=40, chunk_tokens=1200)
    clients = Clients(one_after_the_other(workload(), apart=1))
    serve(assembly, clients, num_blocks=100_000 // block_size)
    assert len(clients.finished) == 48
    Judge(RandomCheckpoint(CONFIG), longest=CONFIG.context_length).check_all(clients)
    assert answers.count(True) > 20, "hardly any step shared"
    assert answers.count(False) > 5
