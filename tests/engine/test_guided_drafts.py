"""Drafts under real guides: masks for every place, what is forced, and the same answer as without."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest

from penstock.core.guide import Guide
from penstock.core.request import FinishReason, Request, TokenEvent
from penstock.core.sampling import SamplingParams
from penstock.engine.fake import FakeRunner
from penstock.engine.guides import Guides
from penstock.kv.cache import KVCache
from penstock.sched.budget import StepBudget
from penstock.sched.scheduler import Scheduler
from penstock.sched.sequence import Sequence
from tests.text.walking import EOS, tokenizer, vocabulary

SCHEMA = {
    "type": "object",
    "properties": {
        "first": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["cat", "dog", "none of them"]},
        "ages": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    },
    "required": ["first", "kind", "ages"],
    "additionalProperties": False,
}
GUIDE = Guide("json_schema", json.dumps(SCHEMA))
MAX_STEPS = 5000

Guess = Callable[[Sequence], list[int]]


def run(request: Request, guess: Guess, guides: Guides) -> tuple[list[TokenEvent], Scheduler]:
    cache = KVCache(128, 4)
    scheduler = Scheduler(cache, StepBudget(64, target_s=None, floor=4), max_num_seqs=8)
    runner = FakeRunner(128, 4, vocab_size=tokenizer().vocab_size)
    scheduler.submit(request, 0.0, guides.open(request))
    events: list[TokenEvent] = []
    for step in range(MAX_STEPS):
        if not scheduler.has_work:
            break
        plan = scheduler.plan(float(step), {s.request.id: guess(s) for s in scheduler.decoding})
        if plan is None:
            guides.wait(0.01)
            continue
        events += scheduler.commit(plan, runner.submit(plan).result(), float(step))
        guides.go()
    assert not scheduler.has_work
    assert cache.pool.num_free == 128
    return events, scheduler


@pytest.fixture(scope="module")
def guides() -> Guides:
    return Guides(vocabulary())


def tokens(events: list[TokenEvent]) -> list[int]:
    return [token_id for event in events for token_id in event.token_ids]


def nothing(sequence: Sequence) -> list[int]:
    return []


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", [{}, {"num_logprobs": 1}], ids=["jumping", "scored"])
def test_a_guided_answer_is_the_same_whatever_is_guessed(seed: int, options: dict[str, int], guides: Guides) -> None:
    """Scored tokens are forced one by one; others are jumped over, also where drafts lie."""
    request = Request(
        "a",
        [5, 6, seed],
        150,
        stop_token_ids=[EOS],
        guide=GUIDE,
        min_tokens=12,
        sampling=SamplingParams(seed=seed, **options),
    )
    plain, _ = run(request, nothing, guides)
    answer = tokens(plain)
    assert set(json.loads(tokenizer().decode(answer))) == {"first", "kind", "ages"}
    source = random.Random(seed)

    def guess(sequence: Sequence) -> list[int]:
        rest = answer[sequence.num_generated :][:6]
        return [t if source.random() < 0.85 else source.randrange(tokenizer().vocab_size) for t in rest]

    guessed, scheduler = run(request, guess, guides)
    assert tokens(guessed) == answer
    assert guessed[-1].finish is plain[-1].finish is FinishReason.STOP
    assert scheduler.counters.accepted_tokens > 0
    assert len(guessed) < len(plain)
    if options:
        scores = [[score for event in events for score in event.logprobs or ()] for events in (plain, guessed)]
        text_len = len(answer) - 1  # the end is forced: whether it has a score, nobody is told
        assert scores[0][:text_len] == scores[1][:text_len]
        assert len(scores[0]) >= text_len


def test_drafts_that_a_guide_bars_never_come(guides: Guides) -> None:
    request = Request("a", [5, 6, 7], 150, stop_token_ids=[EOS], guide=GUIDE, sampling=SamplingParams(seed=3))
    source = random.Random(1)
    vocab_size = tokenizer().vocab_size
    events, _ = run(request, lambda sequence: source.choices(range(vocab_size), k=5), guides)
    assert json.loads(tokenizer().decode(tokens(events)))["kind"] in ("cat", "dog", "none of them")
