"""Memory of a replica: weights, what a step works in, and the KV cache in the rest. Bytes in, tokens out."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.capacity.formats import BYTES, Formats
from penstock.capacity.hardware import Gpu
from penstock.capacity.model_bytes import ModelBytes
from penstock.capacity.rank_share import rank_config
from penstock.core.model_config import ModelConfig
from penstock.core.parallelism import Parallelism
from penstock.core.recurrent import num_states

MEMORY_FRACTION = 0.9  # of a GPU, for all of an engine
RESERVED_BYTES = 2 << 30  # the driver's context, CUDA graphs, the allocator's holes, and the all-reduces' buffers
BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Memory:
    """Memory of the fullest GPU of a replica; `kv_tokens` is the whole replica's. Zero: it does not fit."""

    weight_bytes: int
    step_bytes: int  # activations of the largest step, logits, and what is reserved
    kv_bytes: int
    kv_tokens: int
    state_bytes: int = 0  # recurrent states of as many sequences as may run, and of prefixes


def memory_of(
    config: ModelConfig,
    gpu: Gpu,
    *,
    formats: Formats = Formats(),  # noqa: B008 (frozen)
    parallelism: Parallelism = Parallelism(),  # noqa: B008 (frozen)
    chunk_tokens: int = 8192,
    max_num_seqs: int = 256,
    memory_fraction: float = MEMORY_FRACTION,
) -> Memory:
    return memory_in(
        int(gpu.memory_bytes * memory_fraction),
        config,
        formats=formats,
        parallelism=parallelism,
        chunk_tokens=chunk_tokens,
        max_num_seqs=max_num_seqs,
    )


def memory_in(
    room_bytes: int,
    config: ModelConfig,
    *,
    formats: Formats = Formats(),  # noqa: B008 (frozen)
    parallelism: Parallelism = Parallelism(),  # noqa: B008 (frozen)
    chunk_tokens: int = 8192,
    max_num_seqs: int = 256,
) -> Memory:
    """`room_bytes`: what an engine may use of each GPU."""
    own, stages = rank_config(config, parallelism), parallelism.pp
    model = ModelBytes(own, formats)
    weight_bytes = -(-model.stored_bytes // stages)
    # In a layer: its input and output, and the two halves of the MLP. At the end: logits, and their softmax, in fp32.
    width = 4 * config.hidden_size + 2 * _widest(own)
    if parallelism.sp > 1:  # queries of the group, and what was found for them: before, on the way and behind
        width += 4 * parallelism.sp * own.num_heads * own.head_dim
    logits_bytes = 2 * 4 * max_num_seqs * own.vocab_size
    step_bytes = RESERVED_BYTES + int(chunk_tokens * width * BYTES[formats.dtype]) + logits_bytes
    state_bytes = -(-own.state_bytes // stages) * num_states(max_num_seqs)
    left_bytes = max(0, room_bytes - weight_bytes - step_bytes - state_bytes)
    token_bytes = model.kv_bytes_per_token // stages or 1
    kv_tokens = left_bytes // token_bytes * parallelism.sp // BLOCK_TOKENS * BLOCK_TOKENS
    return Memory(weight_bytes, step_bytes, left_bytes, kv_tokens, state_bytes)


def _widest(config: ModelConfig) -> int:
    """The width of a token's way through an MLP; in a mixture, through all its experts at once."""
    experts = config.experts
    if experts is None:
        return config.intermediate_size
    return max(config.intermediate_size, experts.per_token * experts.intermediate_size)


def kv_tokens_that_fit(
    config: ModelConfig,
    gpu: Gpu,
    *,
    formats: Formats = Formats(),  # noqa: B008 (frozen)
    parallelism: Parallelism = Parallelism(),  # noqa: B008 (frozen)
) -> int:
    return memory_of(config, gpu, formats=formats, parallelism=parallelism).kv_tokens
