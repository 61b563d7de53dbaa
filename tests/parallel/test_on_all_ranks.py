"""What an engine does beside steps happens on all ranks: LoRA adapters, vectors of texts, parking, guides, drafts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.core.guide import Guide
from penstock.core.request import AdapterRef, Request
from penstock.core.sampling import SamplingParams
from penstock.hub.peft import read_peft
from penstock.model.random_weights import RandomCheckpoint
from penstock.runner.assemble import Assembly
from tests.model.family_configs import SHAPE
from tests.model.lora import EVERY_LINEAR, merged, write_adapter
from tests.model.tiny import ArrayCheckpoint
from tests.runner.clients import Clients, one_after_the_other, serve
from tests.runner.devices import assembled
from tests.runner.guessing import Eager, Recalling
from tests.runner.judge import Judge
from tests.runner.turns import TurnGuides, follows

pytestmark = pytest.mark.slow

TEXTS = [np.random.default_rng(5).integers(0, SHAPE.vocab_size, length).tolist() for length in (7, 1, 20, 16)]


@pytest.fixture(scope="module")
def two() -> Assembly:
    return assembled(SHAPE, "cpu tp=2", block_size=4, max_num_seqs=6, chunk_tokens=16, max_loras=1)


@pytest.fixture(scope="module")
def one() -> Assembly:
    return assembled(SHAPE, "cpu", block_size=4, max_num_seqs=6, chunk_tokens=16, max_loras=1)


def asked(count: int, adapters: list[AdapterRef | None]) -> list[Request]:
    dice = np.random.default_rng(3)
    return [
        Request(
            f"r{number}",
            dice.integers(0, SHAPE.vocab_size, int(dice.integers(1, 20))).tolist(),
            8,
            SamplingParams(temperature=0.0),
            adapter=adapters[number % len(adapters)],
        )
        for number in range(count)
    ]


def test_adapters_take_turns_on_every_rank(two: Assembly, tmp_path: Path) -> None:
    """Two adapters and one place: it changes hands while others decode."""
    random_weights = RandomCheckpoint(SHAPE)
    tensors = {name: random_weights.tensor(name) for name in random_weights.tensor_names()}
    judges = {None: Judge(random_weights, longest=64)}
    refs: list[AdapterRef | None] = [None]
    assert two.adapters is not None
    for seed in (1, 2):
        path = write_adapter(tmp_path / str(seed), SHAPE, rank=3, targets=EVERY_LINEAR, seed=seed)
        found = read_peft(path)
        refs.append(AdapterRef(found.digest, path.name))
        judges[refs[-1]] = Judge(ArrayCheckpoint(SHAPE, merged(tensors, found)), longest=64)
        two.adapters.keep(two.adapters.read(str(path), found.digest))
    clients = Clients(one_after_the_other(asked(9, refs), apart=1))
    serve(two, clients, num_blocks=64)
    for answer in clients.finished.values():
        judges[answer.request.adapter].check(answer)


def test_vectors_and_scores_are_those_of_one_rank(one: Assembly, two: Assembly) -> None:
    assert one.embedder is not None
    assert two.embedder is not None
    for ours, theirs in zip(two.embedder.embed(TEXTS), one.embedder.embed(TEXTS), strict=True):
        np.testing.assert_allclose(np.frombuffer(ours, np.float32), np.frombuffer(theirs, np.float32), atol=2e-5)
    scored = [3, 1, 10, 15]
    np.testing.assert_allclose(two.embedder.score(TEXTS, scored), one.embedder.score(TEXTS, scored), atol=2e-4)


def test_all_ranks_park_and_wake(two: Assembly) -> None:
    judge = Judge(RandomCheckpoint(SHAPE), longest=64)
    assert two.memory is not None
    for _ in range(2):
        two.memory.park()
        two.memory.wake()
        clients = Clients(one_after_the_other(asked(3, [None]), apart=1))
        serve(two, clients, num_blocks=64)
        judge.check_all(clients)


@pytest.mark.parametrize("layout", ["tp=2", "pp=2"])
def test_answers_keep_to_their_guides(layout: str, two: Assembly) -> None:
    assembly = two if layout == "tp=2" else assembled(SHAPE, "cpu pp=2", block_size=4, max_num_seqs=6, chunk_tokens=16)
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


@pytest.mark.parametrize("layout", ["tp=2", "pp=2"])
def test_drafts_change_no_token(layout: str, two: Assembly) -> None:
    """Most of what is guessed holds, and some does not."""
    assembly = two if layout == "tp=2" else assembled(SHAPE, "cpu pp=2", block_size=4, max_num_seqs=6, chunk_tokens=16)
    plain = Clients(one_after_the_other(asked(6, [None]), apart=1))
    serve(assembly, plain, num_blocks=64)
    answers = {name: answer.token_ids for name, answer in plain.finished.items()}
    guess = Eager(Recalling(answers, 0.8, SHAPE.vocab_size), most=4)
    drafted = Clients(one_after_the_other(asked(6, [None]), apart=1))
    serve(assembly, drafted, num_blocks=64, speculate=lambda cache: guess)
    assert {name: answer.token_ids for name, answer in drafted.finished.items()} == answers
    assert drafted.measured.speculation.drafted_tokens > drafted.measured.speculation.accepted_tokens > 5
