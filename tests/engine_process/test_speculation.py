from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConfigError
from penstock.core.model_config import ModelConfig
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.core.settings import EngineSettings
from penstock.core.speculating import kind_of
from penstock.core.tokenizer_source import TokenizerMetadata
from penstock.engine_process.speculation import check_vocabularies, draft_checkpoint, make_speculation
from penstock.hub.resolve import resolve
from penstock.kv.cache import KVCache
from penstock.runner.assemble import assemble
from penstock.sched.budget import StepBudget
from penstock.sched.scheduler import Scheduler
from tests.text import small

CONFIG = ModelConfig("llama", 500, 64, 128, 2, 4, 4, 16, 256)


@pytest.mark.parametrize(
    ("settings", "overlaps", "kind"),
    [
        ({}, False, "ngram"),
        ({}, True, "off"),
        ({"speculate": "off"}, False, "off"),
        ({"speculate": "off"}, True, "off"),
        ({"speculate": "ngram"}, False, "ngram"),
        ({"draft": "some model"}, False, "draft"),
        ({"speculate": "draft", "draft": "some model"}, False, "draft"),
        ({"speculate": "ngram"}, True, "ngram"),
        ({"draft": "some model"}, True, "draft"),
    ],
)
def test_what_is_drafted_with_follows_from_settings_and_device(
    settings: dict[str, Any], overlaps: bool, kind: str
) -> None:
    assert kind_of(EngineSettings(**settings), overlaps=overlaps) == kind


@pytest.mark.parametrize(
    ("settings", "overlaps", "said"),
    [
        ({"speculate": "draft"}, False, "no model is named"),
        ({"speculate": "off", "draft": "some model"}, False, "speculate is off"),
        ({"speculate": "ngram", "draft": "some model"}, False, "speculate is ngram"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], overlaps: bool, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        kind_of(EngineSettings(**settings), overlaps=overlaps)


@dataclass
class Files:
    """What is asked of a checkpoint here."""

    config: ModelConfig
    tokenizer_source: TokenizerMetadata
    path: Path = Path("nowhere")


vocabulary = cache(small.sentencepiece)  # trained, and not twice alike


def files(config: ModelConfig, **changes: str) -> Files:
    metadata = vocabulary()
    tokens = list(metadata["tokenizer.ggml.tokens"])
    for old, new in changes.items():
        tokens[tokens.index(old)] = new
    return Files(config, TokenizerMetadata({**metadata, "tokenizer.ggml.tokens": tokens}, None))


def check(large: Files, other: Files) -> None:
    check_vocabularies(large, large.tokenizer_source, other, "the other")  # type: ignore[arg-type]


def test_a_draft_model_must_know_the_same_tokens() -> None:
    large = files(CONFIG)
    check(large, files(CONFIG))
    word = next(t for t in large.tokenizer_source.metadata["tokenizer.ggml.tokens"][300:] if t.isalpha())
    with pytest.raises(ConfigError, match=f"token .* is '{word}', not '{word}xy'"):
        check(large, files(CONFIG, **{word: f"{word}xy"}))
    with pytest.raises(ConfigError, match="knows 12 tokens"):
        check(large, files(replace(CONFIG, vocab_size=12)))


@pytest.mark.slow
def test_a_model_drafts_for_itself() -> None:
    """The default model beside itself, as an engine puts them together; all that the second one guesses holds."""
    settings = EngineSettings(draft="smollm2", draft_tokens=4)
    checkpoint = resolve("smollm2")
    phases: list[str] = []
    small = draft_checkpoint(checkpoint, checkpoint.tokenizer_source, settings)
    assembly = assemble(checkpoint, settings, lambda name, *_: phases.append(name), small)
    cache = KVCache(assembly.size.num_blocks, assembly.limits.block_size)
    speculation, described = make_speculation(settings, assembly, cache)
    assert described == "draft (smollm2), up to 4 tokens"
    assert speculation is not None
    assert "draft" in phases
    scheduler = Scheduler(cache, StepBudget(256, target_s=None, floor=16), max_num_seqs=4)
    scheduler.submit(Request("a", [1, 4093, 198, 5], 24, sampling=SamplingParams(temperature=0.0)), 0.0)
    num_steps = 0
    while scheduler.has_work:
        plan = scheduler.plan(0.0, speculation.drafts(scheduler.decoding))
        assert plan is not None
        result = assembly.runner.submit(plan).result()
        speculation.observe(plan, result, 0.01)  # by this clock a draft costs nothing
        scheduler.commit(plan, result, 0.0)
        num_steps += 1
    assert scheduler.counters.drafted_tokens == scheduler.counters.accepted_tokens > 8
    assert num_steps < 16
