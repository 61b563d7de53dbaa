"""A replica that takes images, but for its model: the fake one answers by the ids of the prompt, images' among them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from penstock.core.image_processor import ImageProcessorConfig
from penstock.core.settings import ServerSettings
from penstock.server.served_model import ServedImages
from tests.server.replica import Replica, serving, small_tokenizer

PLACEHOLDER = "<think>"  # any token of its own will do
TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}: {% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text if part.type == 'text' else '<think>' }}{% endfor %}"
    "{% endif %}</s>{% endfor %}"
)
PROCESSOR = ImageProcessorConfig(
    "qwen_vl",
    PLACEHOLDER,
    (0.5, 0.5, 0.5),
    (0.5, 0.5, 0.5),
    patch_size=4,
    merge_size=2,
    resample=3,
    min_pixels=64,
    max_pixels=400 * 64,
    temporal_patch_size=2,
)


@contextlib.contextmanager
def seeing(settings: ServerSettings | None = None, *, max_tokens: int = 400, **options: Any) -> Iterator[Replica]:
    """`max_tokens`: of an image."""
    placeholder_id = small_tokenizer().added_id(PLACEHOLDER)
    assert placeholder_id is not None
    images = ServedImages(PROCESSOR, placeholder_id, max_tokens)
    with serving(settings, template=TEMPLATE, images=images, **{"image_tokens": 400} | options) as found:
        yield found
