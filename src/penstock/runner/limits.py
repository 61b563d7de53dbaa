"""The limits of a step: from settings, the model and the kind of device. Numbers in, numbers out."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from penstock.core.context import longest_context
from penstock.core.hashing import ROUTING_TOKENS
from penstock.core.model_config import ModelConfig
from penstock.core.recurrent import num_snapshots
from penstock.core.settings import EngineSettings
from penstock.core.speculating import most_drafts

log = logging.getLogger("penstock.runner")

_MAX_ROWS = 160  # of a step with drafts, where there are not as many sequences: more would hardly pay


@dataclass(frozen=True)
class Defaults:
    max_num_seqs: int
    chunk_tokens: int
    block_size: int
    max_loras: int  # on a GPU each takes memory, and graphs of their own: they are asked for
    step_image_tokens: int


DEFAULTS = {"cpu": Defaults(64, 512, 16, 8, 256), "cuda": Defaults(256, 8192, 64, 0, 4096)}
_IMAGE_TOKENS = 16_384  # as many as the largest image of the families that take any size


@dataclass(frozen=True)
class Limits:
    """The limits of a step, and so of the memory it takes."""

    block_size: int  # of a sequence's tokens; where ranks share them out, each keeps a part of a block
    max_num_seqs: int
    chunk_tokens: int
    max_model_len: int
    most_rows: int = 0  # tokens of a step in which sequences bring a few each, drafts mostly; 0: there are none
    num_ahead: int = 1  # steps that are launched before the result of one is read
    image_tokens: int = 0  # of images, whose embeddings are kept; 0: there are none
    step_image_tokens: int = 0  # tokens of images encoded in a step at most, unless a single image has more
    state_snapshots: int = 0  # slots for snapshots of recurrent states, beside sequences' own; 0: none are kept

    @property
    def table_width(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size)

    def within(self, num_blocks: int) -> Limits:
        """A sequence must fit into the cache by itself."""
        capacity = num_blocks * self.block_size
        if capacity < self.max_model_len:
            log.warning("max_model_len is %d, not %d: the KV cache has no room for more", capacity, self.max_model_len)
        return replace(self, max_model_len=min(self.max_model_len, capacity))


def resolve_limits(config: ModelConfig, settings: EngineSettings, device_type: str) -> Limits:
    """Limits of the engine. A GPU's step with drafts is captured as any other, for up to `most_rows` tokens."""
    defaults = DEFAULTS[device_type]
    chunk_tokens = settings.chunk_tokens or defaults.chunk_tokens
    max_num_seqs = min(settings.max_num_seqs or defaults.max_num_seqs, chunk_tokens)
    num_drafts = most_drafts(settings, overlaps=True) if device_type == "cuda" else 0
    most_rows = max(min(max_num_seqs * (1 + num_drafts), _MAX_ROWS), max_num_seqs) if num_drafts else 0
    sp = settings.sp or 1
    # A routing block has whole ones: gateways know by those what a replica has cached.
    block_size = settings.block_size or max(1, min(defaults.block_size, ROUTING_TOKENS // sp))
    image_tokens = resolve_image_tokens(config, settings)
    return Limits(
        block_size=block_size * sp,
        max_num_seqs=max_num_seqs,
        chunk_tokens=chunk_tokens,
        max_model_len=longest_context(settings, config),
        most_rows=most_rows,
        image_tokens=image_tokens,
        step_image_tokens=min(defaults.step_image_tokens, image_tokens),
        state_snapshots=num_snapshots(max_num_seqs, prefix_cache=settings.prefix_cache) if config.linear else 0,
    )


def resolve_image_tokens(config: ModelConfig, settings: EngineSettings) -> int:
    if config.vision is None:
        return 0
    if (settings.pp or 1) > 1:
        log.warning(
            "the model takes images, but not over pipeline stages (pp %d): requests with images are refused",
            settings.pp,
        )
        return 0
    return settings.max_image_tokens or _IMAGE_TOKENS


def resolve_max_loras(settings: EngineSettings, device_type: str) -> int:
    return DEFAULTS[device_type].max_loras if settings.max_loras is None else settings.max_loras
