"""Models that take images, in overlapped steps, and on a GPU in captured graphs: each token is one that the float32
reference on the CPU might have chosen, also beside drafts, guides and adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as changed

from penstock.core.guide import Guide
from penstock.core.request import AdapterRef
from penstock.hub.peft import read_peft
from penstock.model.random_weights import RandomCheckpoint
from tests.devices import NEEDS_GPU
from tests.model.lora import merged, write_adapter
from tests.model.tiny import ArrayCheckpoint
from tests.runner.clients import Clients, one_after_the_other, serve
from tests.runner.devices import assembled
from tests.runner.guessing import Eager, Recalling
from tests.runner.seeing import CONFIGS, SeeingJudge, requests
from tests.runner.turns import TurnGuides, follows

GPU = pytest.param("cuda", marks=NEEDS_GPU)
FAMILIES = pytest.mark.parametrize("family", list(CONFIGS))
OVERLAPPED = pytest.mark.parametrize("device", ["cpu-overlapped", GPU])


@pytest.mark.parametrize("device", ["cpu", "cpu-overlapped", GPU])
@FAMILIES
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


@OVERLAPPED
@FAMILIES
def test_answers_are_the_same_whatever_is_guessed_and_guides_are_followed(family: str, device: str) -> None:
    config = CONFIGS[family]
    block_size = 16 if device == "cuda" else 4
    made = assembled(
        config,
        device,
        block_size=block_size,
        max_num_seqs=8,
        chunk_tokens=24,
        max_image_tokens=40,
        max_loras=0,
        speculate="ngram",
    )
    guide = Guide("regex", "as TurnGuide has it")
    asked = [
        changed(each, max_tokens=24, guide=guide if place % 3 else None) for place, each in enumerate(requests(config))
    ]
    plain, drafted = (Clients(one_after_the_other(asked, apart=2)) for _ in range(2))
    num_blocks, guides = 24 if device == "cuda" else 40, TurnGuides(config.vocab_size)
    serve(made, plain, num_blocks=num_blocks, vision=config.vision, guides=guides)
    answers = {name: answer.token_ids for name, answer in plain.finished.items()}
    guess = Eager(Recalling(answers, 0.7, config.vocab_size), most=4)
    serve(made, drafted, num_blocks=num_blocks, vision=config.vision, guides=guides, speculate=lambda cache: guess)
    assert drafted.measured.speculation.drafted_tokens > drafted.measured.speculation.accepted_tokens > 20
    same = 0
    for name, answer in drafted.finished.items():
        is_guided = answer.request.guide is not None
        assert is_guided == all(follows(token_id, place) for place, token_id in enumerate(answer.token_ids))
        same += answer.token_ids == answers[name]
    assert same >= len(asked) - 1, "where the model is undecided, one may differ"


@OVERLAPPED
@FAMILIES
def test_adapters_of_the_decoder_apply_beside_images(family: str, device: str, tmp_path: Path) -> None:
    config = CONFIGS[family]
    found = read_peft(write_adapter(tmp_path, replace(config, vision=None), seed=3))
    block_size = 16 if device == "cuda" else 4
    made = assembled(
        config, device, block_size=block_size, max_num_seqs=8, chunk_tokens=24, max_image_tokens=40, max_loras=1
    )
    assert made.adapters is not None
    made.adapters.keep(made.adapters.read(str(tmp_path), found.digest))
    adapter = AdapterRef(found.digest, "a")
    asked = [changed(each, adapter=adapter if place % 2 else None) for place, each in enumerate(requests(config))]
    clients = Clients(one_after_the_other(asked, apart=2))
    serve(made, clients, num_blocks=24 if device == "cuda" else 40, vision=config.vision)
    base = RandomCheckpoint(config)
    tensors = merged({name: base.tensor(name) for name in base.tensor_names()}, found)
    judges = [
        SeeingJudge(weights, longest=config.context_length) for weights in (base, ArrayCheckpoint(config, tensors))
    ]
    assert len(clients.finished) == len(asked)
    for answer in clients.finished.values():
        judges[answer.request.adapter is not None].check(answer)
