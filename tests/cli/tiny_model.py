"""Files of a model without weights, which are drawn (load: dummy): for tests in which no text has to make sense."""

from __future__ import annotations

import json
from pathlib import Path

from tests.text.small import byte_level, load

TINY_CONTEXT = 1 << 16  # tokens: a stream of so many surely runs until somebody ends it
TINY = {
    "model_type": "llama",
    "vocab_size": 600,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": TINY_CONTEXT,
    "eos_token_id": 2,
}
TEMPLATE = "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}</s>{% endfor %}"


def write_tiny_model(directory: Path, **config: object) -> None:
    """The files of a model without weights; its vocabulary is larger than its tokenizer's, as many models have it."""
    (directory / "config.json").write_text(json.dumps({**TINY, **config}))
    (directory / "tokenizer.json").write_text(load(byte_level()).to_json())
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
