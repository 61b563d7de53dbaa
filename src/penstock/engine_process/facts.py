"""Facts of a model on a device: by which weights its steps are split, and how many bytes each must read."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import replace

from penstock.capacity.formats import BYTES, Formats
from penstock.capacity.hardware import Peaks, by_driver_name
from penstock.capacity.model_bytes import ModelBytes
from penstock.capacity.rank_share import rank_config
from penstock.core.model_config import ModelConfig
from penstock.core.parallelism import Parallelism
from penstock.core.ranks import RankReads
from penstock.kv.states import StateSlots
from penstock.model.shard import Axis, Shard
from penstock.runner.limits import Limits
from penstock.sched.cost import Work
from penstock.sched.images import ImageSlots

# Operations that a device does in the time in which it reads a byte: an H200's by its measured peaks, and a CPU core's
# by what its steps took (`python -m tools.cost`).
_FLOPS_PER_BYTE = {"cuda": 173.0, "cpu": 12.0}


def work_of(config: ModelConfig, device: str, kv_token_bytes: int, peaks: Peaks | None) -> Work:
    """Prices of a step's parts in operations; a read counts as the operations that could have been done meanwhile."""
    model = ModelBytes(config)
    flops_per_byte = _FLOPS_PER_BYTE["cuda" if device.startswith("cuda") else "cpu"]
    if peaks is not None:
        flops_per_byte = peaks.flops_per_s["bfloat16"] / peaks.bytes_per_s
    return Work(
        token=model.linear_flops_per_token,
        choice=model.head_flops_per_token,
        read=kv_token_bytes * flops_per_byte,
        pair=model.flops_per_pair,
    )


def state_slots(config: ModelConfig, limits: Limits) -> StateSlots | None:
    """None: its sequences have no recurrent state."""
    return StateSlots(limits.max_num_seqs, limits.state_snapshots) if config.linear is not None else None


def image_slots(config: ModelConfig, limits: Limits) -> ImageSlots:
    """A token of an image is several patches through the encoder, and one of a prompt passes the decoder."""
    if config.vision is None:
        return ImageSlots()
    patches = config.vision.merge_size**2
    price = patches * config.vision.num_parameters(config.hidden_size) / config.num_active_parameters
    return ImageSlots(limits.image_tokens, limits.step_image_tokens, price=price)


def weight_bytes(config: ModelConfig, number_format: str, quant: str) -> int:
    """Read in every step; 0: nobody has said how large this format is."""
    linear = number_format if quant == "none" else quant
    if linear not in BYTES or number_format not in BYTES:
        return 0
    return ModelBytes(config, Formats(linear, dtype=number_format)).read_bytes


def rank_reads(
    config: ModelConfig,
    number_format: str,
    quant: str,
    parallelism: Parallelism,
    stages: Sequence[Sized],
    kv_token_bytes: int,
) -> tuple[RankReads, ...]:
    """Memory by rank; none: there is one, or nobody has said how large this format is. `stages`: the layers of each."""
    if parallelism.num_ranks == 1 or not weight_bytes(config, number_format, quant):
        return ()
    formats = Formats(number_format if quant == "none" else quant, dtype=number_format)
    largest, group = rank_config(config, parallelism), config.num_heads // config.num_kv_heads
    found = []
    for rank in range(parallelism.num_ranks):
        shard = Shard(rank % parallelism.tp, parallelism.tp, parallelism.sp)
        stage = rank // parallelism.tp
        heads = shard.num_units(Axis(config.num_heads, group=group, are_heads=True), "attention")
        keys = Axis(config.num_kv_heads, repeats=True, group=1, are_heads=True)
        kv_heads = shard.num_units(keys, "the attention's keys and values")
        own = ModelBytes(replace(largest, num_heads=heads, num_kv_heads=kv_heads), formats)
        layers = len(stages[stage]) / config.num_layers
        is_last = stage == parallelism.pp - 1
        weights = own.linear_bytes * layers
        head = BYTES[formats.dtype] * own.head_parameters if is_last else 0
        kv = kv_token_bytes * layers * kv_heads / config.num_kv_heads / parallelism.sp
        found.append(RankReads(round(weights + head), round(kv)))
    return tuple(found)


def peaks_of(device_name: str) -> Peaks | None:
    gpu = by_driver_name(device_name)
    return gpu.measured if gpu is not None else None
