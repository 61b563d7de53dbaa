"""Greedy output after images is that of transformers, whatever the engine does on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from transformers import PreTrainedModel

from penstock.core.images import ImageInput
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.model.layers import CausalLM
from penstock.model.loading import load_model
from penstock.model.ops import Ops
from penstock.model.vision import VisionEncoder
from penstock.model.vision.loading import load_vision
from tests.equality.inprocess import InProcess
from tests.equality.reference import assert_greedy
from tests.equality.test_families import make_ops
from tests.model.tiny_vision import CONFIGS, VisionCheckpoint, hf_vision_model, made_image, prompt_of, vision_logits

TEXT: list[int] = torch.randint(11, 256, (60,), generator=torch.Generator().manual_seed(5)).tolist()
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class SeeingPair:
    name: str
    theirs: PreTrainedModel
    ours: CausalLM
    encoder: VisionEncoder
    ops: Ops

    def engine(self, **options: int) -> InProcess:
        return InProcess(self.ours, self.ops, encoder=self.encoder, **options)

    def image(self, seed: int, rows: int = 4, columns: int = 6) -> ImageInput:
        return made_image(self.name, seed, rows, columns)

    def check(self, engine: InProcess, *requests: Request) -> None:
        for request in requests:
            output = engine.outputs[request.id]
            assert len(output) == request.max_tokens
            assert_greedy(vision_logits(self.theirs, request.prompt_ids, request.images, output), output)


@pytest.fixture(
    scope="module", params=[("native", name) for name in CONFIGS] + [("reference", "qwen3-vl")], ids="-".join
)
def pair(request: pytest.FixtureRequest) -> SeeingPair:
    kernels, name = request.param
    theirs, ops = hf_vision_model(name), make_ops(kernels)
    checkpoint = VisionCheckpoint(theirs)
    encoder = load_vision(checkpoint, ops)
    assert encoder is not None
    return SeeingPair(name, theirs, load_model(checkpoint, ops), encoder, ops)


def seeing(name: str, *parts: Sequence[int] | ImageInput, max_tokens: int = 8) -> Request:
    ids, images = prompt_of(*parts)
    return Request(name, ids, max_tokens, sampling=GREEDY, images=images)


def test_one_image(pair: SeeingPair) -> None:
    engine = pair.engine()
    request = seeing("a", TEXT[:5], pair.image(1), TEXT[5:9])
    engine.run(request)
    pair.check(engine, request)


def test_text_alone_beside_images_of_several_sizes(pair: SeeingPair) -> None:
    engine = pair.engine()
    requests = [
        seeing("text", TEXT[20:40]),
        seeing("two", TEXT[:3], pair.image(1), TEXT[3:4], pair.image(2, 10, 4), TEXT[4:9]),
        seeing("first", pair.image(3, 2, 8), TEXT[4:9], max_tokens=12),
    ]
    engine.run(*requests, apart=2)
    pair.check(engine, *requests)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7])
def test_images_that_are_cut_by_chunks(pair: SeeingPair, chunk_tokens: int) -> None:
    engine = pair.engine(chunk_tokens=chunk_tokens, max_num_seqs=2)
    requests = [
        seeing("a", TEXT[:2], pair.image(1), TEXT[5:9], pair.image(2), TEXT[9:11], max_tokens=5),
        seeing("b", TEXT[:4], pair.image(3, 6, 6), TEXT[5:7], max_tokens=5),
    ]
    engine.run(*requests)
    pair.check(engine, *requests)


def test_images_in_the_prefix_cache_are_not_encoded_again(pair: SeeingPair) -> None:
    engine = pair.engine(image_tokens=18, step_image_tokens=18)
    first = seeing("first", TEXT[:6], pair.image(1, 6, 6), TEXT[6:16])
    engine.run(first)
    other = seeing("other", TEXT[:6], pair.image(2, 6, 6), TEXT[6:16])
    engine.run(other, seeing("large", pair.image(3, 6, 12), TEXT[:3]))  # its embeddings take the place of all others
    encoded = engine.scheduler.images.encoded_tokens
    again = seeing("again", *(TEXT[:6], pair.image(1, 6, 6), TEXT[6:16]), max_tokens=10)
    engine.run(again)
    assert engine.scheduler.images.encoded_tokens == encoded
    assert engine.cached["other"] <= 6 < 6 + first.images[0].num_tokens <= engine.cached["again"]
    assert engine.outputs["again"][:8] == engine.outputs["first"]
    assert engine.outputs["other"] != engine.outputs["first"]
    pair.check(engine, first, other, again)


def test_an_image_of_which_only_a_part_is_cached_is_encoded_again(pair: SeeingPair) -> None:
    engine = pair.engine(image_tokens=18, step_image_tokens=18, num_blocks=12, share_prefixes=True)
    request = seeing("a", TEXT[:3], pair.image(1, 6, 6), TEXT[6:8], pair.image(2, 6, 6), max_tokens=4)
    engine.run(request)
    again = seeing("again", TEXT[:3], pair.image(1, 6, 6), TEXT[6:8], pair.image(2, 6, 6), TEXT[:1], max_tokens=4)
    engine.run(seeing("large", pair.image(3, 6, 12), TEXT[:3]))
    engine.run(again)
    pair.check(engine, request, again)


def test_preempted_sequences_with_images(pair: SeeingPair) -> None:
    engine = pair.engine(num_blocks=14, chunk_tokens=7, share_prefixes=False, image_tokens=18, step_image_tokens=9)
    requests = [
        seeing("a", TEXT[:3], pair.image(1), TEXT[6:8], max_tokens=20),
        seeing("b", TEXT[:5], pair.image(2, 6, 6), TEXT[6:8], max_tokens=20),
        seeing("c", TEXT[:9], pair.image(1), max_tokens=20),
    ]
    engine.run(*requests)
    assert engine.preemptions > 0
    pair.check(engine, *requests)


def test_images_are_encoded_a_few_in_a_step_and_text_goes_on_beside_them(pair: SeeingPair) -> None:
    engine = pair.engine(step_image_tokens=9, max_num_seqs=8)
    decoding = seeing("text", TEXT[:5], max_tokens=16)
    engine.submit(decoding)
    engine.step()
    requests = [seeing(f"r{seed}", TEXT[:seed], pair.image(seed, 6, 6), TEXT[8:9]) for seed in range(1, 5)]
    for request in requests:
        engine.submit(request)
    encoded = []
    while engine.scheduler.has_work:
        plan = engine.step()
        assert plan is not None
        encoded.append(sum(image.num_tokens for image in plan.encodes))
        assert "text" in {planned.request_id for planned in plan.slices} or len(engine.outputs["text"]) == 16
    assert max(encoded) <= 9
    assert sum(encoded) == sum(request.images[0].num_tokens for request in requests)
    pair.check(engine, decoding, *requests)


def test_images_beside_penalties_over_the_prompt(pair: SeeingPair) -> None:
    engine = pair.engine()
    ids, images = prompt_of(TEXT[:5], pair.image(1), TEXT[5:9])
    engine.run(Request("a", ids, 6, sampling=SamplingParams(temperature=0.0, repetition_penalty=1.2), images=images))
    assert len(engine.outputs["a"]) == 6
