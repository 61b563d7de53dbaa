"""Lexicons of small real tokenizers under the kinds of chat template there are."""

from __future__ import annotations

from functools import cache

from penstock.api import tokenizer_bundle as model_text
from penstock.api.tokenizer_bundle import TokenizerBundle
from penstock.gateway.tokens.prompt_tokenizer import PromptTokenizer
from penstock.text.tokenizer import Tokenizer
from tests.text import small

CHATML = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
# Brings a system prompt of its own, as Llama 3.1's, Qwen 2.5's and gpt-oss's do.
WORDY = "<s>system\nYou are an assistant that answers at length. Knowledge ends in June 2024.</s>" + CHATML
ECHOING = "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}"
CHATTY = "{% for m in messages %}<s>A turn of the one whose name is written here:{{ m.role }}</s>{% endfor %}"
TEMPLATES = {"chatml": CHATML, "wordy": WORDY, "echoing": ECHOING, "chatty": CHATTY}
TOKENIZERS = {"byte_level": "smollm", "digits": "llama3", "composed": "qwen2", "sentencepiece": None}


@cache
def tokenizer(kind: str) -> Tokenizer:
    pre = TOKENIZERS[kind]
    return small.load(small.sentencepiece() if pre is None else small.byte_level(pre))


@cache
def prompt_tokenizer(kind: str = "byte_level", template: str | None = "chatml") -> PromptTokenizer:
    found = tokenizer(kind)
    text = TokenizerBundle(
        tokenizer=found.to_json(),
        special_tokens=found.special_tokens(),
        chat_template=TEMPLATES[template] if template is not None else None,
        vocab_size=found.vocab_size,
        bos_token_id=1,
    )
    encoded = model_text.encode(text)
    return PromptTokenizer(model_text.decode(encoded), model_text.digest(encoded))
