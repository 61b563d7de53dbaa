"""Image preprocessing for each family's encoder. Results are those of transformers' own image processors in Pillow and
numpy (`Idefics3ImageProcessorPil`, `SmolVLMImageProcessorPil`, `Qwen2VLImageProcessorPil`), bit by bit.
"""

from __future__ import annotations

from penstock.core.image_processor import ImageProcessorConfig
from penstock.images.processors.idefics3 import Idefics3
from penstock.images.processors.layout import Layout, Processor, Tile
from penstock.images.processors.qwen_vl import QwenVL

__all__ = ["Layout", "Processor", "Tile", "processor_of"]


def processor_of(config: ImageProcessorConfig) -> Processor:
    return Idefics3(config) if config.family == "idefics3" else QwenVL(config)
