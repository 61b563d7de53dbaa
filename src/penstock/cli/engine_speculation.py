"""What an engine drafts with, by its settings: a lookup in the text, a second model, or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from penstock.core.errors import ConfigError
from penstock.core.settings import EngineSettings
from penstock.core.tokenizer_source import TokenizerFiles, TokenizerMetadata
from penstock.hub.checkpoint import Checkpoint
from penstock.kv.cache import KVCache
from penstock.sched.speculation import Proposer, Speculation

if TYPE_CHECKING:
    from penstock.runner.assemble import Assembly, Phase

Kind = Literal["off", "ngram", "draft"]

_MOST_TOKENS: dict[Kind, int] = {"off": 0, "ngram": 16, "draft": 6}  # unless told otherwise


def kind_of(settings: EngineSettings, *, overlaps: bool) -> Kind:
    """On a device that is given a step before the last one is read, nobody knows what to draft after."""
    wanted = settings.speculate
    if settings.draft is not None and wanted not in ("auto", "draft"):
        raise ConfigError(f"draft names a model, but speculate is {wanted}", param="draft")
    if wanted == "draft" and settings.draft is None:
        raise ConfigError("speculate is draft, but no model is named to draft with (--draft MODEL)", param="draft")
    kind: Kind = wanted if wanted != "auto" else "ngram" if settings.draft is None else "draft"
    if not overlaps or kind == "off":
        return kind
    if wanted == "auto" and settings.draft is None:
        return "off"
    raise ConfigError(
        "speculation is for CPUs so far: on a GPU a step begins before the last is read", param="speculate"
    )


def make_speculation(
    checkpoint: Checkpoint,
    source: TokenizerFiles | TokenizerMetadata,
    settings: EngineSettings,
    assembly: Assembly,
    cache: KVCache,
    phase: Phase,
) -> tuple[Speculation | None, str]:
    """And what to call it. The checkpoint and the tokenizer are the large model's."""
    kind = kind_of(settings, overlaps=assembly.runner.overlaps)
    if kind == "off":
        return None, "off"
    from penstock.sched.lookup import PromptLookup

    proposer: Proposer = PromptLookup()
    if kind == "draft":
        proposer = _draft_model(checkpoint, source, settings, assembly, cache, phase)
    most = settings.draft_tokens or _MOST_TOKENS[kind]
    described = f"{kind} ({settings.draft})" if kind == "draft" else kind
    return Speculation(proposer, most), f"{described}, up to {most} tokens"


def _draft_model(
    checkpoint: Checkpoint,
    source: TokenizerFiles | TokenizerMetadata,
    settings: EngineSettings,
    assembly: Assembly,
    cache: KVCache,
    phase: Phase,
) -> Proposer:
    from penstock.engine.draft_model import DraftModel
    from penstock.hub.resolve import resolve
    from penstock.runner.draft import assemble_draft

    assert settings.draft is not None
    phase("draft", 0, 0)
    small = resolve(settings.draft)
    check_vocabularies(checkpoint, source, small, settings.draft)
    return DraftModel(
        assemble_draft(small, settings, assembly, phase).runner,
        cache.pool,
        context_length=small.config.context_length,
        chunk_tokens=assembly.chunk_tokens,
        reserve=assembly.max_num_seqs,
    )


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
