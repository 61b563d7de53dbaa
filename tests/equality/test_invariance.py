"""With the native kernels a request's logits are bitwise the same however it was batched, chunked, cached or resumed,
so what it samples from them is too."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Literal

import msgspec
import pytest
import torch
from torch import Tensor

from penstock.core.model_config import ModelConfig
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.model.layers import CausalLM
from penstock.model.loading import random_model
from penstock.model.ops import Linear
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.library import ARITHMETICS
from penstock.model.ops.native import NativeOps
from penstock.model.quantized import Weight
from penstock.sched.sequence import Sequence as LiveSequence
from tests.equality.inprocess import InProcess
from tests.model.ops.low_bit import grouped

# SmolLM2's heads, with a layer that sees a window: widths that fill the kernels' tiles and widths that do not.
CONFIG = ModelConfig(
    architecture="qwen3",
    vocab_size=515,
    hidden_size=256,
    intermediate_size=360,
    num_layers=2,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    context_length=256,
    windows=(None, 19),
)
TOKENS = torch.randint(0, CONFIG.vocab_size, (300,), generator=torch.Generator().manual_seed(7)).tolist()
SHARED = TOKENS[:37]
PARAMS = [
    SamplingParams(temperature=0.9, seed=1),
    SamplingParams(temperature=1.3, top_p=0.8, seed=2),
    SamplingParams(temperature=1.0, top_k=20, min_p=0.05, seed=3),
    SamplingParams(temperature=0.8, presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.2, seed=4),
    SamplingParams(temperature=0.0, logit_bias={5: 2.0}),
]
PROMPTS = [
    SHARED + TOKENS[40:43],
    SHARED + TOKENS[50:81],
    SHARED[:21] + TOKENS[90:100],
    TOKENS[100:101],
    TOKENS[110:175],
]
REQUESTS = [
    Request(f"r{i}", prompt, 9 + 2 * i, sampling=params)
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))
]


class LowBitOps(NativeOps):
    """All weights in so many bits, head and embedding too."""

    def __init__(self, bits: Literal[4, 8], threads: int) -> None:
        super().__init__("bfloat16", threads=threads, keeps=frozenset({bits}))
        self.bits = bits

    def linear(self, weight: Weight, bias: Tensor | None = None, *, precise: bool = True) -> Linear:
        return super().linear(self._rounded(weight), bias, precise=precise)

    def embedding(self, table: Weight) -> Linear:
        return super().embedding(self._rounded(table))

    def _rounded(self, weight: Weight) -> Weight:
        assert isinstance(weight, Tensor)
        columns = weight.shape[1]
        return grouped(weight, self.bits, 32 if columns % 32 == 0 else columns, has_minimums=True)


SCENES: dict[str, Callable[..., NativeOps]] = {
    **{name: partial(NativeOps, name) for name in ARITHMETICS},
    "4 bits": partial(LowBitOps, 4),
    "8 bits": partial(LowBitOps, 8),
    "int8 cache": partial(NativeOps, "bfloat16", kv_dtype=torch.int8),
}


@cache
def model_on(arithmetic: str, threads: int) -> tuple[CausalLM, NativeOps]:
    ops = SCENES[arithmetic](threads=threads)
    return random_model(CONFIG, ops, seed=11), ops


class Scene:
    """One arithmetic, and what each request says when it is alone in the engine."""

    def __init__(self, arithmetic: str) -> None:
        self.arithmetic = arithmetic
        self.alone = {request.id: self.run([request]) for request in REQUESTS}

    def engine(self, *, threads: int = 1, **options: Any) -> InProcess:
        return InProcess(*model_on(self.arithmetic, threads), **options)

    def run(self, requests: Sequence[Request], *, apart: int = 0, **options: int) -> InProcess:
        engine = self.engine(**options)
        engine.run(*requests, apart=apart)
        return engine

    def check(self, engine: InProcess, requests: Sequence[Request] = REQUESTS) -> None:
        for request in requests:
            alone = self.alone[request.id]
            assert engine.outputs[request.id] == alone.outputs[request.id]
            assert torch.equal(torch.stack(engine.logits[request.id]), torch.stack(alone.logits[request.id]))


# Eight bits are unpacked otherwise than four, and all the rest is the same.
@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.slow if name == "8 bits" else []) for name in SCENES]
)
def scene(request: pytest.FixtureRequest) -> Scene:
    try:
        return Scene(request.param)
    except KernelsUnavailable as error:
        pytest.skip(str(error))


def test_batched(scene: Scene) -> None:
    scene.check(scene.run(REQUESTS))
    scene.check(scene.run(REQUESTS, apart=3, chunk_tokens=40))


@pytest.mark.parametrize("chunk_tokens", [1, 7])
def test_chunked(scene: Scene, chunk_tokens: int) -> None:
    scene.check(scene.run(REQUESTS, chunk_tokens=chunk_tokens))


def test_blocks_of_any_size(scene: Scene) -> None:
    for block_size in (1, 5, 16, 64):
        scene.check(scene.run(REQUESTS, block_size=block_size, num_blocks=-(-300 // block_size), chunk_tokens=21))


def test_cached(scene: Scene) -> None:
    engine = scene.engine()
    for request in REQUESTS:
        engine.run(request)
    scene.check(engine)
    assert engine.cached["r1"] > 32
    again = [msgspec.structs.replace(request, id=f"{request.id} again") for request in REQUESTS]
    engine.run(*again)
    for request, repeated in zip(REQUESTS, again, strict=True):
        assert engine.cached[repeated.id] >= len(request.prompt_ids) // 4 * 4 - 1
        assert engine.outputs[repeated.id] == engine.outputs[request.id]
        assert torch.equal(torch.stack(engine.logits[repeated.id]), torch.stack(engine.logits[request.id]))


def test_preempted(scene: Scene) -> None:
    engine = scene.run(REQUESTS, num_blocks=24, chunk_tokens=19)
    assert engine.preemptions > 0
    scene.check(engine)


def test_drafted(scene: Scene) -> None:
    """Rows of drafts are what the tokens would have been one by one; so is what is chosen from them."""
    source = random.Random(1)

    def guess(sequence: LiveSequence) -> list[int]:
        rest = scene.alone[sequence.request.id].outputs[sequence.request.id][sequence.num_generated :]
        return [t if source.random() < 0.8 else source.randrange(CONFIG.vocab_size) for t in rest[:6]]

    for options in ({"num_blocks": 24, "chunk_tokens": 19}, {"threads": 2, "block_size": 16}):
        engine = scene.engine(guess=guess, **options)
        engine.run(*REQUESTS)
        scene.check(engine)
        assert engine.scheduler.counters.drafted_tokens > engine.scheduler.counters.accepted_tokens > 0


def test_on_two_threads(scene: Scene) -> None:
    scene.check(scene.run(REQUESTS, threads=2, chunk_tokens=50))


ONE_SCENE = pytest.mark.parametrize("scene", ["bfloat16"], indirect=True)  # what is drawn knows only the logits


@ONE_SCENE
def test_siblings_sample_what_each_would_alone(scene: Scene) -> None:
    siblings = [
        Request(f"choice {seed}", PROMPTS[0], 10, sampling=SamplingParams(temperature=1.2, seed=seed))
        for seed in range(4)
    ]
    together = scene.run(siblings)
    for sibling in siblings:
        assert together.outputs[sibling.id] == scene.run([sibling]).outputs[sibling.id]
    assert len({tuple(output) for output in together.outputs.values()}) == 4


@ONE_SCENE
def test_a_stream_carried_on_elsewhere_goes_on_as_it_would_have(scene: Scene) -> None:
    """Another replica gets the tokens already sent as a part of the prompt; random numbers go by position."""
    for request in REQUESTS[:3]:  # without penalties, which tell prompt and output apart
        output = scene.alone[request.id].outputs[request.id]
        rest = msgspec.structs.replace(
            request, prompt_ids=[*request.prompt_ids, *output[:4]], max_tokens=request.max_tokens - 4
        )
        assert scene.run([rest]).outputs[request.id] == output[4:]
