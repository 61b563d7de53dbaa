"""What an engine does beside steps happens on all ranks: LoRA adapters, vectors of texts, parking, guides, drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.core.errors import ModelUnsupported
from penstock.core.guide import Guide
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.model.random_weights import RandomCheckpoint
from penstock.runner.assemble import Assembly
from penstock.sched.speculation.draft_model import DraftModel
from tests.model.family_configs import SHAPE
from tests.model.lora import write_adapter
from tests.parallel.beside_steps import (
    TEXTS,
    Adapted,
    answer_with,
    asked,
    make_adapters,
    read_and_keep,
    same_vectors_and_scores,
    take_turns,
)
from tests.runner.clients import Clients, one_after_the_other, serve
from tests.runner.devices import assembled
from tests.runner.guessing import Eager, Recalling
from tests.runner.judge import Judge
from tests.runner.turns import TurnGuides, follows

pytestmark = pytest.mark.slow


def assembly_of(layout: str) -> Assembly:
    max_loras = None if "pp" in layout else 1
    return assembled(SHAPE, f"cpu {layout}", block_size=4, max_num_seqs=6, chunk_tokens=16, max_loras=max_loras)


@pytest.fixture(scope="module", params=["tp=2", "pp=2", "tp=2 sp=2"])
def two(request: pytest.FixtureRequest) -> Assembly:
    return assembly_of(request.param)


@pytest.fixture(scope="module", params=["tp=2", "pp=2", "tp=2 pp=2", "tp=2 sp=2"])
def several(request: pytest.FixtureRequest) -> Assembly:
    """Layers that are split, stages of a pipeline, both, and tokens that are shared out."""
    return assembled(SHAPE, f"cpu {request.param}", block_size=4, max_num_seqs=6, chunk_tokens=16, max_loras=1)


@pytest.fixture(scope="module")
def one() -> Assembly:
    return assembled(SHAPE, "cpu", block_size=4, max_num_seqs=6, chunk_tokens=16, max_loras=1)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return make_adapters(tmp_path_factory.mktemp("adapters"))


def test_adapters_take_turns_on_every_rank(several: Assembly, adapted: Adapted) -> None:
    take_turns(several, adapted)


@pytest.mark.parametrize("layer", [0, SHAPE.num_layers - 1])
def test_an_adapter_that_fits_all_layers_but_one_changes_nothing_on_any_rank(
    layer: int, several: Assembly, adapted: Adapted, tmp_path: Path
) -> None:
    """Whichever stage has the layer."""
    wide = replace(SHAPE, intermediate_size=2 * SHAPE.intermediate_size)
    bad = write_adapter(tmp_path, SHAPE, rank=3, layers={layer: wide})
    with pytest.raises(ModelUnsupported, match=rf"layers\.{layer}\.mlp\.\w+ is \[.*, and this model's is"):
        read_and_keep(several, bad)
    for path in adapted.paths.values():
        read_and_keep(several, path)
    answer_with(several, adapted)


def test_an_adapter_of_layers_that_no_stage_has_is_refused(several: Assembly, tmp_path: Path) -> None:
    deeper = replace(SHAPE, num_layers=SHAPE.num_layers + 1)
    with pytest.raises(ModelUnsupported, match=rf"adapts model\.layers\.{SHAPE.num_layers}\..*no linear layer of this"):
        read_and_keep(several, write_adapter(tmp_path, deeper, rank=3))


def test_vectors_and_scores_are_those_of_one_rank(one: Assembly, several: Assembly) -> None:
    same_vectors_and_scores(several, one)


def test_all_ranks_park_and_wake(two: Assembly) -> None:
    judge = Judge(RandomCheckpoint(SHAPE), longest=64)
    assert two.memory is not None
    for _ in range(2):
        two.memory.park()
        two.memory.wake()
        clients = Clients(one_after_the_other(asked(3, [None]), apart=1))
        serve(two, clients, num_blocks=64)
        judge.check_all(clients)


@pytest.mark.parametrize("layout", ["tp=2", "pp=2", "tp=2 sp=2"])
def test_answers_keep_to_their_guides(layout: str) -> None:
    assembly = assembly_of(layout)
    guided = [
        Request(
            f"g{number}",
            prompt,
            10,
            SamplingParams(temperature=0.9, seed=number),
            guide=Guide("regex", "as TurnGuide has it"),
        )
        for number, prompt in enumerate(TEXTS)
    ]
    clients = Clients(one_after_the_other(guided, apart=1))
    serve(assembly, clients, num_blocks=64, guides=TurnGuides(SHAPE.vocab_size))
    for answer in clients.finished.values():
        assert all(follows(token, place) for place, token in enumerate(answer.token_ids))


@pytest.mark.parametrize("layout", ["tp=2", "pp=2", "tp=2 sp=2"])
def test_drafts_change_no_token(layout: str) -> None:
    """Most of what is guessed holds, and some does not."""
    assembly = assembly_of(layout)
    plain = Clients(one_after_the_other(asked(6, [None]), apart=1))
    serve(assembly, plain, num_blocks=64)
    answers = {name: answer.token_ids for name, answer in plain.finished.items()}
    guess = Eager(Recalling(answers, 0.8, SHAPE.vocab_size), most=4)
    drafted = Clients(one_after_the_other(asked(6, [None]), apart=1))
    serve(assembly, drafted, num_blocks=64, speculate=lambda cache: guess)
    assert {name: answer.token_ids for name, answer in drafted.finished.items()} == answers
    assert drafted.measured.speculation.drafted_tokens > drafted.measured.speculation.accepted_tokens > 5


@pytest.mark.parametrize("layout", ["tp=2", "pp=2", "tp=2 sp=2"])
def test_a_second_model_guesses_for_all_ranks(layout: str) -> None:
    """It is whole on the first rank, and has whole blocks. With sp those of the large model have half of their tokens
    there."""
    sizes = {"block_size": 4, "max_num_seqs": 6, "chunk_tokens": 16}
    assembly = assembled(SHAPE, f"cpu {layout}", **sizes, speculate="draft")  # type: ignore[arg-type]
    assert assembly.draft is not None
    draft = assembly.draft
    clients = Clients(one_after_the_other(asked(6, [None]), apart=1))
    serve(
        assembly,
        clients,
        num_blocks=32,
        speculate=lambda cache: Eager(
            DraftModel(draft.runner, cache.pool, context_length=draft.context_length, chunk_tokens=16, reserve=4),
            most=4,
        ),
    )
    Judge(RandomCheckpoint(SHAPE), longest=64).check_all(clients)
    told = clients.measured.speculation
    assert told.accepted_tokens > 0.9 * told.drafted_tokens > 10, "it is the same model"
