"""Encoded images, made here: noise, so that no two places look alike."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image


def noise(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Soft noise: a filter of any size changes it, and none makes it grey."""
    dice = np.random.default_rng(seed)
    bands = len(Image.new(mode, (1, 1)).getbands())
    coarse = dice.integers(0, 256, (max(2, height // 3), max(2, width // 3), bands), dtype=np.uint8)
    layers = [Image.fromarray(coarse[:, :, band]).resize((width, height)) for band in range(bands)]
    return Image.merge(mode, layers) if bands > 1 else layers[0].convert(mode)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def url(width: int, height: int, seed: int = 0) -> str:
    return data_url(encoded(noise(width, height, seed)))
