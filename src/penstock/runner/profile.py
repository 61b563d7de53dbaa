"""A rehearsal before the KV cache is made: the engine does the most that it can ever be asked, on a cache of one block.

The memory it takes meanwhile it will take again, so the cache gets the rest. Measured rather than computed, since
libraries, kernels and captured graphs take memory that no formula knows.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import torch

from penstock.core.errors import ConfigError
from penstock.core.images import ImageInput
from penstock.core.model_config import VisionConfig
from penstock.core.sampling import SamplingParams
from penstock.runner.limits import Limits
from penstock.runner.memory import GpuMemory
from penstock.runner.rehearsal_note import RehearsalNote
from penstock.runner.rows import MAX_TOKENS
from penstock.sched.plan import SampleSpec, Slice, StepPlan
from penstock.sched.scheduler import ADMISSION_SCAN

# Nucleus sampling sorts the whole vocabulary, penalties copy the logits, and the API gives at most 20 logprobs.
_DEAREST = SamplingParams(top_p=0.9, presence_penalty=0.1, num_logprobs=20)
_DECODE_CONTEXT = 1024


def largest_step(limits: Limits) -> StepPlan:
    """Prompts that fill a step, decodes in every place they leave, all of them sampled, and the most block copies.

    All lie in block 0: what the numbers come to makes no difference to the memory they take.
    """
    longest = min(limits.chunk_tokens, limits.max_model_len)
    whole, rest = divmod(limits.chunk_tokens, longest)
    prompts = ([longest] * whole + [rest] * (rest > 0))[: limits.max_num_seqs]
    decodes = decode_step(limits.max_num_seqs - len(prompts), limits).slices
    slices = [_slice(f"prompt-{i}", 0, length, limits) for i, length in enumerate(sorted(prompts))]
    return StepPlan(decodes + slices, [(0, 0)] * min(limits.max_num_seqs, ADMISSION_SCAN))


def rows_step(limits: Limits) -> StepPlan:
    """Step of as many sequences with drafts as there can be, all tokens chosen from."""
    count = min(limits.most_rows // 2, limits.max_num_seqs)
    return StepPlan([_drafted(f"drafted-{i}", limits.most_rows // count, limits) for i in range(count)])


def adapted(plan: StepPlan) -> StepPlan:
    """The same step with adapters: what lies in the slot makes no difference to the memory either."""
    return StepPlan([msgspec.structs.replace(each, slot=0) for each in plan.slices])


def decode_step(num_decodes: int, limits: Limits) -> StepPlan:
    """If they are many, it pays to read the context that they share once for all: that takes memory too."""
    start = min(limits.max_model_len, _DECODE_CONTEXT) - 1
    return StepPlan([_slice(f"decode-{i}", start, 1, limits) for i in range(num_decodes)])


def images_step(limits: Limits, vision: VisionConfig) -> StepPlan:
    """The largest image that there may be, or as many as are encoded in a step, beside a prompt."""
    return msgspec.structs.replace(largest_step(limits), encodes=_images(limits, vision))


def forgetting_step(limits: Limits, vision: VisionConfig) -> StepPlan:
    """Step that forgets the images that `images_step` has left."""
    digests = [image.digest for image in _images(limits, vision)]
    return msgspec.structs.replace(decode_step(1, limits), drops=digests)


def _images(limits: Limits, vision: VisionConfig) -> list[ImageInput]:
    if vision.family == "idefics3":
        side = vision.image_size // vision.patch_size
        each, shape = (side // vision.merge_size) ** 2, [3, vision.image_size, vision.image_size]
        count, grid = max(1, limits.step_image_tokens // each), [1, side, side]
    else:
        rows = max(1, math.isqrt(limits.image_tokens))
        columns = limits.image_tokens // rows
        count, each, grid = 1, rows * columns, [1, rows * vision.merge_size, columns * vision.merge_size]
        shape = [grid[1] * grid[2], vision.patch_values]
    values = bytes(4 * math.prod(shape))
    return [ImageInput(f"{place:08x}", 0, each, grid, shape, values) for place in range(count)]


def _slice(request_id: str, start: int, num_tokens: int, limits: Limits) -> Slice:
    end = start + num_tokens
    sample = SampleSpec(_DEAREST, history=[0, 0], prompt_len=1, position=end)
    return Slice(request_id, start, num_tokens, [0] * num_tokens, [0] * -(-end // limits.block_size), sample, epoch=0)


def _drafted(request_id: str, num_tokens: int, limits: Limits) -> Slice:
    num_tokens = min(num_tokens, MAX_TOKENS)
    start = max(0, min(limits.max_model_len, _DECODE_CONTEXT) - num_tokens)
    planned = _slice(request_id, start, num_tokens, limits)
    assert planned.sample is not None
    return msgspec.structs.replace(planned, ahead=[planned.sample] * (num_tokens - 1))


def profile(
    rehearse: Callable[[], object], device: torch.device, free_before_bytes: int, note: RehearsalNote | None
) -> GpuMemory:
    """The device's memory beside what `rehearse` has made and run: all the runners, on caches of one block.

    Torch keeps what it was given, so all that was taken at any moment is still taken when this looks. The note of an
    earlier engine of the same kind is believed; None: nobody notes anything.
    """
    torch.cuda.empty_cache()
    free_at_first, total_bytes = torch.cuda.mem_get_info(device)
    taken_bytes = note.read() if note is not None else None
    if taken_bytes is None:
        reserved_at_first = torch.cuda.memory_reserved(device)
        runners = rehearse()
        taken_bytes = free_at_first - torch.cuda.mem_get_info(device)[0]
        if note is not None:
            note.write(taken_bytes, torch.cuda.memory_reserved(device) - reserved_at_first)
        del runners
        gc.collect()
        torch.cuda.empty_cache()
    return GpuMemory(total_bytes, free_before_bytes, free_at_first - taken_bytes)


@contextmanager
def told_if_too_large(what: str, advice: str) -> Iterator[None]:
    """Start-up ends in one clear line where a device is too small."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise ConfigError(f"{what} does not fit into the device's memory; {advice}") from None
