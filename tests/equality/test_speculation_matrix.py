"""Speculation beside everything else that touches a token, on the default model: guides, siblings, prefixes that are
shared, stop strings, penalties, scores, watermarks, sequences that are pushed out. Answers are those without it."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import partial

import pytest

from penstock.core.guide import Guide
from penstock.core.request import FinishReason, Request, TokenEvent
from penstock.core.sampling import SamplingParams
from penstock.core.watermark import Watermark
from penstock.engine.guides import Guides
from penstock.hub.resolve import resolve
from penstock.kv.cache import KVCache
from penstock.kv.pool import BlockPool
from penstock.model.loading import load_model
from penstock.model.ops import Ops
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.native import NativeOps
from penstock.runner.runner import ModelRunner
from penstock.sched.budget import StepBudget
from penstock.sched.scheduler import Scheduler
from penstock.sched.sequence import Sequence
from penstock.sched.speculation.draft_model import DraftModel
from penstock.sched.speculation.ngram import PromptLookup
from penstock.sched.speculation.speculation import Proposer
from penstock.server.choices import ChoiceText
from penstock.text.detokenizer import Detokenizer
from penstock.text.grammars import Vocabulary, Words
from penstock.text.stops import StopStrings
from penstock.text.tokenizer import Tokenizer
from tests.model.paged import kv_shape

pytestmark = pytest.mark.slow

BLOCK, MAX_STEPS, DRAFTS = 8, 4000, 5
CROWDED = 22  # blocks, of which all sequences together want many more
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"enum": ["France", "Germany", "Portugal"]},
        "population": {"type": "integer"},
        "is_capital": {"type": "boolean"},
    },
    "required": ["city", "country", "population", "is_capital"],
    "additionalProperties": False,
}
TEXT = "The river ran past the mill, and the mill stood by the river. The miller watched the river run past the mill."


class World:
    """The model, with room for few blocks, and everything beside it."""

    def __init__(self) -> None:
        checkpoint = resolve("smollm2")
        self.tokenizer = Tokenizer.load(checkpoint.tokenizer_source)
        config = checkpoint.config
        self.guides = Guides(Vocabulary(Words.of(self.tokenizer, config.vocab_size, config.eos_token_ids)))
        try:
            self.ops: Ops = NativeOps("bfloat16", threads=1)
        except KernelsUnavailable as error:
            pytest.skip(str(error))
        self.model = load_model(checkpoint, self.ops)
        self.eos = list(config.eos_token_ids)

    def runner(self, num_blocks: int) -> ModelRunner:
        return ModelRunner(self.model, self.ops, self.ops.allocate_kv(kv_shape(self.model.config, num_blocks, BLOCK)))

    def prompt(self, text: str) -> list[int]:
        chat = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        return self.tokenizer.encode(chat, add_special_tokens=False)

    def requests(self) -> list[Request]:
        quote = self.prompt(f"Quote this text twice: {TEXT}")
        person = self.prompt("Describe a city as JSON.")
        guide = Guide("json_schema", json.dumps(SCHEMA))
        ends = partial(Request, stop_token_ids=self.eos)
        return [
            Request("greedy", quote, 32, sampling=SamplingParams(temperature=0.0)),
            *(Request(f"sibling {n}", quote, 20, sampling=SamplingParams(temperature=0.6, seed=n)) for n in range(3)),
            Request("nucleus", quote, 20, sampling=SamplingParams(top_p=0.9, top_k=50, min_p=0.01, seed=9)),
            Request(
                "penalties",
                quote,
                20,
                sampling=SamplingParams(temperature=0.5, presence_penalty=0.5, repetition_penalty=1.2, seed=4),
            ),
            Request("marked", quote, 20, sampling=SamplingParams(seed=3, watermark=Watermark(b"k" * 32))),
            Request("scored", quote, 16, sampling=SamplingParams(temperature=0.0, num_logprobs=3)),
            ends("biased", quote, 20, sampling=SamplingParams(logit_bias={self.eos[0]: 4.0}, seed=2), min_tokens=12),
            ends("guided", person, 64, guide=guide, sampling=SamplingParams(temperature=0.0)),
            ends("guided too", person, 64, guide=guide, sampling=SamplingParams(seed=5)),
            ends("guided, scored", person, 64, guide=guide, sampling=SamplingParams(seed=6, num_logprobs=1)),
        ]

    def run(self, requests: list[Request], kind: str, num_blocks: int) -> tuple[dict[str, list[TokenEvent]], Scheduler]:
        cache = KVCache(num_blocks, BLOCK)
        scheduler = Scheduler(cache, StepBudget(256, target_s=None, floor=BLOCK), max_num_seqs=8)
        runner = self.runner(num_blocks)
        proposer = self.proposer(kind, cache.pool)
        for request in requests:
            guide = self.guides.open(request) if request.guide is not None else None
            scheduler.submit(request, 0.0, guide)
        events: dict[str, list[TokenEvent]] = defaultdict(list)
        for step in range(MAX_STEPS):
            if not scheduler.has_work:
                break
            plan = scheduler.plan(float(step), drafts_for(scheduler.decoding, proposer))
            if plan is None:
                self.guides.wait(0.01)
                continue
            result = runner.submit(plan).result()
            for event in scheduler.commit(plan, result, float(step)):
                events[event.request_id].append(event)
            self.guides.go()
        assert not scheduler.has_work
        assert cache.pool.num_free == num_blocks
        return events, scheduler

    def proposer(self, kind: str, pool: BlockPool) -> Proposer | None:
        if kind == "draft":  # the model itself: most of what it drafts holds
            return DraftModel(self.runner(pool.num_blocks), pool, context_length=2048, chunk_tokens=256, reserve=4)
        return PromptLookup() if kind == "ngram" else None

    def answer(self, request: Request, events: list[TokenEvent]) -> tuple[str, int, FinishReason | None]:
        """As a client that asked for a stop string reads it."""
        detokenizer = Detokenizer(self.tokenizer, prompt_ids=request.prompt_ids)
        text = ChoiceText(0, detokenizer, self.tokenizer, StopStrings(["miller w", "\n\n"]))
        read = ""
        for event in events:
            piece = text.read_event(event)
            read += piece.text
            if piece.finish is not None:
                return read, text.num_tokens, piece.finish
        raise AssertionError("it never ended")


def drafts_for(decoding: list[Sequence], proposer: Proposer | None) -> dict[str, list[int]]:
    """For everybody, whether it pays or not."""
    if proposer is None:
        return {}
    wanted = [(sequence, DRAFTS) for sequence in decoding if proposer.look(sequence) is not None]
    found = proposer.propose(wanted) if wanted else []
    return {sequence.request.id: drafts for (sequence, _), drafts in zip(wanted, found, strict=True)}


def tokens(events: list[TokenEvent]) -> list[int]:
    return [token_id for event in events for token_id in event.token_ids]


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@pytest.fixture(scope="module")
def plain(world: World) -> dict[str, list[TokenEvent]]:
    """What they say without speculation, with room for all. That it is what each says by itself is others' to test."""
    return world.run(world.requests(), "off", 256)[0]


@pytest.mark.parametrize("kind", ["ngram", "draft"])
def test_every_answer_is_the_one_without(world: World, plain: dict[str, list[TokenEvent]], kind: str) -> None:
    requests = world.requests()
    together, scheduler = world.run(requests, kind, CROWDED)
    for request in requests:
        mine, theirs = together[request.id], plain[request.id]
        assert tokens(mine) == tokens(theirs), request.id
        assert mine[-1].finish is theirs[-1].finish
        assert world.answer(request, mine) == world.answer(request, theirs)
        scores = [[score for event in events for score in event.logprobs or ()] for events in (mine, theirs)]
        shared = min(map(len, scores))  # a guide's end may have one, and is not read
        assert scores[0][:shared] == scores[1][:shared]
        assert request.sampling.num_logprobs is None or shared >= len(tokens(theirs)) - 1
        if request.guide is not None and mine[-1].finish is FinishReason.STOP:
            assert list(json.loads(world.tokenizer.decode(tokens(mine)))) == list(SCHEMA["properties"])  # type: ignore[call-overload]
    counters = scheduler.counters
    assert counters.drafted_tokens > counters.accepted_tokens > 20
    assert counters.cached_tokens > 0
    assert counters.preemptions > 0
