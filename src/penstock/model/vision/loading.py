"""The image encoder of a checkpoint, by its family."""

from __future__ import annotations

import torch

from penstock.core.errors import ModelCorrupt
from penstock.hub.checkpoint import Checkpoint
from penstock.model.ops import Ops
from penstock.model.vision import Load, Reader, VisionEncoder
from penstock.model.vision.idefics3 import Idefics3Encoder
from penstock.model.vision.qwen2_5_vl import Qwen25Encoder
from penstock.model.vision.qwen3_vl import Qwen3Encoder

_FAMILIES: dict[str, Load] = {
    "idefics3": Idefics3Encoder.load,
    "qwen2_5_vl": Qwen25Encoder.load,
    "qwen3_vl": Qwen3Encoder.load,
}


@torch.inference_mode()
def load_vision(checkpoint: Checkpoint, ops: Ops) -> VisionEncoder | None:
    """None: the model takes no images."""
    config = checkpoint.config.vision
    if config is None:
        return None
    dtype = torch.float32 if ops.device.type == "cpu" else ops.activation_dtype
    try:
        return _FAMILIES[config.family](config, Reader(checkpoint, ops.device, dtype))
    except RuntimeError as error:  # parts that torch cannot put together
        raise ModelCorrupt(f"{checkpoint.path}: the image encoder's tensors do not fit together ({error})") from None
