"""With blocks that come back from host memory every answer is what it is without, to the bit of its logits."""

from __future__ import annotations

import random

import pytest
import torch

from penstock.core.model_config import ModelConfig
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.model.loading import random_model
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.native import NativeOps
from tests.equality.inprocess import InProcess
from tests.equality.test_invariance import CONFIG
from tests.equality.test_more_invariance import MODELS


def requests() -> list[Request]:
    """Conversations that go on in turns, so that a cache of a few blocks has lost each one's when it comes again."""
    rng = random.Random(3)
    histories = [[rng.randrange(CONFIG.vocab_size) for _ in range(20)] for _ in range(4)]
    found = []
    for turn in range(3):
        for number, history in enumerate(histories):
            history += [rng.randrange(CONFIG.vocab_size) for _ in range(9)]
            sampling = SamplingParams(temperature=0.9, seed=number) if number % 2 else SamplingParams(temperature=0.0)
            found.append(Request(f"r{turn}-{number}", list(history), 8, sampling=sampling, tenant=f"t{number % 2}"))
    return found


@pytest.mark.parametrize(
    ("host_blocks", "config"),
    [
        pytest.param(5, CONFIG, id="5"),
        pytest.param(200, CONFIG, id="200"),
        pytest.param(200, MODELS["latents"], id="200 latents", marks=pytest.mark.slow),
    ],
)
def test_answers_are_the_same_to_the_bit(host_blocks: int, config: ModelConfig) -> None:
    try:
        ops = NativeOps("float32", threads=1)
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
    model = random_model(config, ops)
    # Without a cache that anybody shares, with one on the device alone, and with both.
    plain = InProcess(model, ops, num_blocks=200, share_prefixes=False)
    small = InProcess(model, ops, num_blocks=20, max_num_seqs=3)
    tiered = InProcess(model, ops, num_blocks=20, max_num_seqs=3, host_blocks=host_blocks)
    for engine in (plain, small, tiered):
        engine.run(*requests())
    host = tiered.cache.pool.host
    assert host is not None
    assert host.num_loaded > 0
    assert tiered.preemptions > 0
    if host_blocks == 200:  # then nothing is ever lost
        assert tiered.scheduler.counters.cached_tokens > small.scheduler.counters.cached_tokens
        assert tiered.scheduler.counters.recomputed_tokens <= small.scheduler.counters.recomputed_tokens
    for name, logits in plain.logits.items():
        for engine in (small, tiered):
            assert engine.outputs[name] == plain.outputs[name]
            assert torch.equal(torch.stack(engine.logits[name]), torch.stack(logits))
