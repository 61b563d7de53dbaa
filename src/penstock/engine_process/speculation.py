"""Speculative decoding of an engine by its settings: drafts from a lookup in the text, a second model, or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.errors import ConfigError
from penstock.core.settings import EngineSettings
from penstock.core.speculating import kind_of, most_drafts
from penstock.core.tokenizer_source import TokenizerFiles, TokenizerMetadata
from penstock.hub.checkpoint import Checkpoint
from penstock.kv.cache import KVCache
from penstock.sched.speculation.speculation import Proposer, Speculation

if TYPE_CHECKING:
    from penstock.runner.assemble import Assembly


def draft_checkpoint(
    checkpoint: Checkpoint, source: TokenizerFiles | TokenizerMetadata, settings: EngineSettings
) -> Checkpoint | None:
    """Checkpoint to draft with, if one is named. The checkpoint and the tokenizer given are the large model's."""
    if settings.draft is None:
        return None
    from penstock.hub.resolve import describe, resolve
    from penstock.model.random_weights import RandomCheckpoint

    small: Checkpoint
    if settings.load == "dummy":
        files = describe(settings.draft)
        small = RandomCheckpoint(files.config, tokenizer_source=files.tokenizer_source)
    else:
        small = resolve(settings.draft)
    check_vocabularies(checkpoint, source, small, settings.draft)
    return small


def make_speculation(settings: EngineSettings, assembly: Assembly, cache: KVCache) -> tuple[Speculation | None, str]:
    """Speculation by the settings, and what to call it."""
    overlaps = assembly.runner.overlaps
    kind = kind_of(settings, overlaps=overlaps)
    if kind == "off":
        return None, "off"
    from penstock.sched.speculation.device_costs import DeviceCosts
    from penstock.sched.speculation.ngram import PromptLookup
    from penstock.sched.speculation.step_costs import StepCosts

    proposer: Proposer = PromptLookup()
    if kind == "draft":
        from penstock.sched.speculation.draft_model import DraftModel

        assert assembly.draft is not None
        proposer = DraftModel(
            assembly.draft.runner,
            cache.pool,
            context_length=assembly.draft.context_length,
            chunk_tokens=assembly.limits.chunk_tokens,
            reserve=assembly.limits.max_num_seqs,
        )
    most = most_drafts(settings, overlaps=overlaps)
    described = f"{kind} ({settings.draft})" if kind == "draft" else kind
    costs = DeviceCosts(assembly.limits.most_rows) if overlaps else StepCosts()
    return Speculation(proposer, most, costs), f"{described}, up to {most} tokens"


def check_vocabularies(
    large: Checkpoint, source: TokenizerFiles | TokenizerMetadata, small: Checkpoint, name: str
) -> None:
    """A token must mean the same to both."""
    from penstock.text.tokenizer import Tokenizer

    ours, theirs = large.config.vocab_size, small.config.vocab_size
    if ours != theirs:
        raise ConfigError(f"{name} cannot draft for this model: it knows {theirs} tokens, not {ours}", param="draft")
    one, other = Tokenizer.load(source), Tokenizer.load(small.tokenizer_source)
    for token_id in range(min(ours, one.vocab_size)):
        if one.token_bytes(token_id) != other.token_bytes(token_id):
            read = f"{one.token_text(token_id)!r}, not {other.token_text(token_id)!r}"
            raise ConfigError(f"{name} cannot draft for this model: token {token_id} is {read}", param="draft")
