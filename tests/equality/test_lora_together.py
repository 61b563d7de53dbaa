"""Requests for several adapters in one engine: each gets what it would get alone, to the bit, whatever is beside it and
however adapters have to take turns on the device."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec
import pytest
import torch

from penstock.core.model_config import ModelConfig
from penstock.core.request import AdapterRef, Request
from penstock.core.sampling import SamplingParams
from penstock.hub.peft import read_peft
from penstock.model.loading import load_model
from penstock.model.lora import AdaptedModel, with_adapters
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.native import NativeOps
from penstock.model.random_weights import RandomCheckpoint
from penstock.model.weights import Site
from penstock.runner.lora import RunnerAdapters
from tests.equality.inprocess import InProcess
from tests.model.lora import ATTENTION, EVERY_LINEAR, write_adapter

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=201,
    hidden_size=96,
    intermediate_size=160,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    context_length=128,
)
TOKENS = torch.randint(0, CONFIG.vocab_size, (200,), generator=torch.Generator().manual_seed(2)).tolist()
NUM_SLOTS = 2


class Adapted:
    """A model with two slots, and four adapters that want them."""

    def __init__(self, directory: Path) -> None:
        self.ops = NativeOps("float32", threads=2)
        sites: list[Site] = []
        model = load_model(RandomCheckpoint(CONFIG), self.ops, sites=sites)
        self.model: AdaptedModel = with_adapters(model, sites, self.ops, NUM_SLOTS)
        self.adapters = RunnerAdapters(self.model.bank)
        self.refs: list[AdapterRef | None] = [None]
        self._alone: dict[str, InProcess] = {}
        for seed in range(4):
            targets = ATTENTION if seed % 2 else EVERY_LINEAR
            path = write_adapter(directory / str(seed), CONFIG, seed=seed, rank=3 + 5 * seed, targets=targets)
            found = read_peft(path)
            self.adapters.keep(self.adapters.read(str(path), found.digest))
            self.refs.append(AdapterRef(found.digest, f"adapter {seed}"))

    def alone(self, request: Request) -> InProcess:
        if request.id not in self._alone:
            self._alone[request.id] = self.engine()
            self._alone[request.id].run(request)
        return self._alone[request.id]

    def engine(self, **options: int) -> InProcess:
        return InProcess(self.model, self.ops, adapters=self.adapters, num_slots=NUM_SLOTS, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    try:
        return Adapted(tmp_path_factory.mktemp("adapters"))
    except KernelsUnavailable as error:
        pytest.skip(str(error))


@cache
def work(prompt_len: int, place: int) -> Request:
    params = SamplingParams(temperature=0.9, seed=place)
    return Request(f"r{place}", TOKENS[: prompt_len + place], 13 + place % 5, sampling=params)


def requests(adapted: Adapted, count: int) -> list[Request]:
    """All of them begin with the same tokens, and go round the adapters and the base model."""
    return [
        msgspec.structs.replace(work(20, place), adapter=adapted.refs[place % len(adapted.refs)])
        for place in range(count)
    ]


@pytest.mark.parametrize(
    "options",
    [{}, {"chunk_tokens": 7}, {"num_blocks": 17, "chunk_tokens": 64}, {"max_num_seqs": 3}],
    ids=["together", "chunked", "preempted", "few at a time"],
)
def test_each_gets_what_it_would_get_alone(adapted: Adapted, options: dict[str, int]) -> None:
    asked = requests(adapted, 10)
    engine = adapted.engine(**options)
    engine.run(*asked, apart=1)
    if "num_blocks" in options:
        assert engine.preemptions > 0
    for request in asked:
        alone = adapted.alone(request)
        assert engine.outputs[request.id] == alone.outputs[request.id]
        for found, expected in zip(engine.logits[request.id], alone.logits[request.id], strict=True):
            assert torch.equal(found, expected)
    assert engine.scheduler.adapters.swaps > NUM_SLOTS, "they never took turns"


def test_adapters_share_no_cached_prefix_with_each_other_or_the_base(adapted: Adapted) -> None:
    engine = adapted.engine()
    asked = requests(adapted, 5)
    engine.run(*asked, apart=3)
    assert {engine.cached[request.id] for request in asked} == {0}
    again = [msgspec.structs.replace(request, id=f"again {request.id}") for request in asked]
    engine.run(*again)
    assert all(engine.cached[request.id] > 0 for request in again)
    for first, second in zip(asked, again, strict=True):
        assert engine.outputs[first.id] == engine.outputs[second.id]
