"""Directories of tiny random models that take images, as a user has them: weights, a tokenizer, a chat template and how
images are made ready; and what transformers answers with them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer
from transformers import (
    AutoModelForImageTextToText,
    Idefics3Config,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
    SmolVLMConfig,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.model.tiny_vision import QWEN3_ROPE, QWEN3_VISION, QWEN_ROPE, QWEN_VISION, SIGLIP, TEXT
from tests.text.small import byte_level, load

TILES = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
PADS = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_start|>", "<|im_end|>"]
CONTEXT = 2048
# Content is read part by part, and a text that is none is not seen at all.
TILES_TEMPLATE = """{% for message in messages %}{{ message.role | capitalize }}{{ ':' if message.content[0].type == \
'image' else ': ' }}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% elif part.type == \
'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"""
PADS_TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == \
'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}\
<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def _tokenizer(marks: list[str]) -> PreTrainedTokenizerFast:
    inner = Tokenizer.from_str(load(byte_level()).to_json())
    inner.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in marks])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", bos_token="<s>")


@dataclass(frozen=True)
class Seeing:
    """One family: its files, and its reference."""

    name: str
    template: str
    marks: list[str]
    max_pixels: int = 8 * 8 * 30

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return _tokenizer(self.marks)

    @cached_property
    def model(self) -> PreTrainedModel:
        torch.manual_seed(3)
        model = AutoModelForImageTextToText.from_config(self._config(), attn_implementation="eager")
        return model.eval().requires_grad_(False)

    @cached_property
    def image_processor(self) -> Any:
        if self.name.startswith("qwen"):
            size = {"shortest_edge": 8 * 8 * 2, "longest_edge": self.max_pixels}
            return Qwen2VLImageProcessorPil(size=size, patch_size=4)
        return Idefics3ImageProcessorPil(size={"longest_edge": 72}, max_image_size={"longest_edge": 24})

    def write(self, directory: Path) -> Path:
        self.model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)
        self.image_processor.save_pretrained(directory)
        (directory / "chat_template.jinja").write_text(self.template)
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
        return directory

    def inputs(self, messages: list[dict[str, Any]], images: list[Image.Image]) -> dict[str, torch.Tensor]:
        """Returns inputs as transformers' processor makes them: `messages` has {"type": "image"} for each image."""
        text: Any = self.tokenizer.apply_chat_template(
            messages, chat_template=self.template, tokenize=False, add_generation_prompt=True
        )
        if not self.name.startswith("qwen"):
            side = SIGLIP["image_size"] // SIGLIP["patch_size"] // self._config().scale_factor
            processor = Idefics3Processor(self.image_processor, self.tokenizer, image_seq_len=side**2)
            made = processor(images=images, text=text, add_special_tokens=False, return_tensors="pt")
            return {name: made[name] for name in ("input_ids", "attention_mask", "pixel_values")}
        made = self.image_processor(images=images, return_tensors="pt")  # its processor wants torchvision, for videos
        for grid in made["image_grid_thw"]:
            text = text.replace("<|image_pad|>", "<|placed|>" * (int(grid.prod()) // 4), 1)
        told = self.tokenizer(
            text.replace("<|placed|>", "<|image_pad|>"), add_special_tokens=False, return_tensors="pt"
        )
        is_image = (told["input_ids"] == self._config().image_token_id).int()
        kept = {name: told[name] for name in ("input_ids", "attention_mask")}
        return {**kept, **made, "mm_token_type_ids": is_image}

    @torch.inference_mode()
    def answer(self, messages: list[dict[str, Any]], images: list[Image.Image], count: int) -> tuple[str, list[int]]:
        """The text, and the ids of the prompt."""
        inputs = self.inputs(messages, images)
        ids = self.model.generate(**inputs, do_sample=False, max_new_tokens=count, min_new_tokens=count)
        prompt = inputs["input_ids"][0].tolist()
        return str(self.tokenizer.decode(ids[0, len(prompt) :], skip_special_tokens=True)), prompt

    def _config(self) -> Any:
        ids = {mark: self.tokenizer.convert_tokens_to_ids(mark) for mark in self.marks}
        text = TEXT | {"vocab_size": len(self.tokenizer), "max_position_embeddings": CONTEXT, "eos_token_id": 2}
        text |= {"bos_token_id": 1, "pad_token_id": 2}
        if not self.name.startswith("qwen"):
            kind = Idefics3Config if self.name == "idefics3" else SmolVLMConfig
            return kind(
                text_config=text | {"model_type": "llama"},
                vision_config=SIGLIP,
                scale_factor=2 if self.name == "idefics3" else 3,
                image_token_id=ids["<image>"],
                tie_word_embeddings=self.name == "smolvlm",
                pad_token_id=2,
            )
        tokens = {
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
        }
        if self.name == "qwen2.5-vl":
            return Qwen2_5_VLConfig(
                text_config=text | {"rope_parameters": QWEN_ROPE}, vision_config=QWEN_VISION, **tokens
            )
        return Qwen3VLConfig(
            text_config=text | {"num_hidden_layers": 3, "rope_parameters": QWEN3_ROPE},
            vision_config=QWEN3_VISION,
            **tokens,
        )


FAMILIES = {
    "idefics3": Seeing("idefics3", TILES_TEMPLATE, [*TILES, *ROWS]),
    "smolvlm": Seeing("smolvlm", TILES_TEMPLATE, [*TILES, *ROWS]),
    "qwen2.5-vl": Seeing("qwen2.5-vl", PADS_TEMPLATE, PADS),
    "qwen3-vl": Seeing("qwen3-vl", PADS_TEMPLATE, PADS),
}
