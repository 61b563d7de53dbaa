"""Drafts on each device's runner, in the engine's own loop: whatever is guessed, every token is one that the reference
might have chosen. Steps with drafts wait for the one before; those without go ahead of it, where the device can."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.core.guide import Guide
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.kv.cache import KVCache
from penstock.model.random_weights import RandomCheckpoint
from penstock.runner.assemble import Assembly
from penstock.sched.speculation.draft_model import DraftModel
from penstock.sched.speculation.ngram import PromptLookup
from penstock.sched.speculation.speculation import Speculation
from tests.devices import NEEDS_GPU
from tests.runner.clients import Clients, one_after_the_other, serve
from tests.runner.devices import assembled
from tests.runner.guessing import Eager, Recalling
from tests.runner.judge import Judge
from tests.runner.test_cuda_runner import CONFIG, GREEDY, SHORT, TOKENS, answered, workload
from tests.runner.turns import TurnGuides, follows

DEVICES = [
    pytest.param(("cpu-overlapped", 16), id="cpu-overlapped-16", marks=pytest.mark.slow),
    pytest.param(("cuda", 16), id="cuda-16", marks=NEEDS_GPU),
    pytest.param(("cuda", 64), id="cuda-64", marks=NEEDS_GPU),
]


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(RandomCheckpoint(CONFIG), longest=CONFIG.context_length)


@pytest.fixture(scope="module", params=DEVICES)
def assembly(request: pytest.FixtureRequest) -> Assembly:
    device, block_size = request.param
    return assembled(CONFIG, device, block_size=block_size, speculate="ngram")


def drafted(assembly: Assembly, requests: list[Request], guess: Eager, *, num_tokens: int, apart: int) -> Clients:
    clients = Clients(one_after_the_other(requests, apart=apart))
    serve(assembly, clients, num_blocks=num_tokens // assembly.limits.block_size, speculate=lambda cache: guess)
    assert len(clients.finished) == len(requests)
    assert clients.measured.speculation.drafted_tokens > clients.measured.speculation.accepted_tokens > 50
    assert guess.num_ahead > 0, "no step went ahead of the one before"
    return clients


@pytest.mark.parametrize(
    ("greedy", "num_tokens"), [(True, TOKENS), (False, SHORT)], ids=["greedy-roomy", "sampled-short of blocks"]
)
def test_every_token_is_the_references(assembly: Assembly, judge: Judge, greedy: bool, num_tokens: int) -> None:
    is_short = num_tokens == SHORT
    requests = workload(1, greedy=greedy, short_prompts=is_short)
    plain = answered(assembly, requests, num_tokens=num_tokens, apart=2 * is_short).finished
    answers = {name: answer.token_ids for name, answer in plain.items()}
    guess = Eager(Recalling(answers, 0.8, CONFIG.vocab_size), most=5)
    clients = drafted(assembly, requests, guess, num_tokens=num_tokens, apart=2 * is_short)
    judge.check_all(clients)
    assert (clients.measured.totals.preemptions > 0) == is_short
    same = sum(answers[name] == answer.token_ids for name, answer in clients.finished.items())
    assert same >= len(requests) - 1, "where the reference is undecided, one may differ"


def test_text_that_repeats_is_guessed_from_itself(assembly: Assembly, judge: Judge) -> None:
    """Bias makes the model say the same few tokens over and over."""
    sampling = SamplingParams(temperature=0.0, logit_bias=dict.fromkeys((7, 8, 9), 30.0))
    requests = [Request(f"r{i}", [i, 7, 8, 9, 7], 60, sampling) for i in range(6)]
    clients = drafted(assembly, requests, Eager(PromptLookup(), most=15), num_tokens=TOKENS, apart=1)
    judge.check_all(clients)


def guided_requests() -> list[Request]:
    """Every third is not guided. Some have what makes their next token depend on the last one in other ways too."""
    samplings = [
        GREEDY,
        SamplingParams(seed=5, num_logprobs=2),
        SamplingParams(seed=6, presence_penalty=1.0, top_p=0.9),
        SamplingParams(temperature=0.0, repetition_penalty=1.2),
    ]
    guide = Guide("regex", "as TurnGuide has it")
    return [
        Request(f"r{i}", [40 + i, 41, 42], 30 + i, samplings[i % 4], guide=guide if i % 3 else None) for i in range(12)
    ]


def guided_answers(assembly: Assembly, speculate: Callable[[KVCache], Speculation] | None) -> Clients:
    clients = Clients(one_after_the_other(guided_requests(), apart=1))
    guides = TurnGuides(CONFIG.vocab_size)
    serve(assembly, clients, num_blocks=TOKENS // assembly.limits.block_size, speculate=speculate, guides=guides)
    return clients


def test_guided_answers_are_the_same_whatever_is_guessed(assembly: Assembly) -> None:
    plain = guided_answers(assembly, None)
    answers = {name: answer.token_ids for name, answer in plain.finished.items()}
    assert all(follows(token_id, place) for place, token_id in enumerate(answers["r1"]))
    assert not all(follows(token_id, place) for place, token_id in enumerate(answers["r0"]))
    guess = Eager(Recalling(answers, 0.8, CONFIG.vocab_size), most=4)
    clients = guided_answers(assembly, lambda cache: guess)
    assert clients.measured.speculation.drafted_tokens > clients.measured.speculation.accepted_tokens > 30
    assert clients.measured.totals.forced_tokens > 0
    assert {name: answer.token_ids for name, answer in clients.finished.items()} == answers


@pytest.mark.parametrize("seed", [0, 1], ids=["a model that knows", "one that does not"])
@pytest.mark.parametrize("device", DEVICES[:2])
def test_a_second_model_guesses_in_the_same_blocks(device: tuple[str, int], judge: Judge, seed: int) -> None:
    """Even where blocks are short, sequences are preempted and blocks change hands."""
    name, block_size = device
    assembly = assembled(CONFIG, name, block_size=block_size, speculate="draft", draft_seed=seed)
    assert assembly.draft is not None
    draft = assembly.draft
    clients = Clients(one_after_the_other(workload(2, greedy=True, short_prompts=True)[:8], apart=2))
    serve(
        assembly,
        clients,
        num_blocks=SHORT // block_size,
        speculate=lambda cache: Eager(
            DraftModel(
                draft.runner,
                cache.pool,
                context_length=draft.context_length,
                chunk_tokens=assembly.limits.chunk_tokens,
                reserve=4,
            ),
            most=4,
        ),
    )
    judge.check_all(clients)
    share = clients.measured.speculation.accepted_tokens / clients.measured.speculation.drafted_tokens
    assert clients.measured.speculation.drafted_tokens > 100
    assert clients.measured.totals.preemptions > 0
    assert share > 0.95 if seed == 0 else share < 0.3
