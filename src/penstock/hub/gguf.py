"""A GGUF file as a checkpoint: llama.cpp's names, shapes and row order turned into Hugging Face's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.errors import ModelCorrupt
from penstock.core.model_config import ModelConfig
from penstock.core.tokenizer_source import TokenizerMetadata
from penstock.hub.families import FAMILY_FILES, ExpertNames
from penstock.hub.gguf_config import ROPE_TABLES, GGUFDescription
from penstock.hub.gguf_file import GGUFFile
from penstock.hub.stored import FloatArray, GroupedTensor, Part, Stored, StoredTensor

TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SHARED_GATE = "ffn_gate_inp_shexp"

Place = tuple[str, int | None]  # the file's tensor, and which of the experts stacked in it


class GGUFCheckpoint:
    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        self._description = GGUFDescription(self._file)
        self._files = FAMILY_FILES[self._description.family]
        self._parts = {**IN_BLOCK, **self._files.gguf_parts, **_expert_parts(self._files.experts)}
        # Hugging Face's name -> where it lies
        self._places = dict(
            place for name in self._file.tensors if not _is_rope_table(name) for place in self._of(name)
        )
        self._config = self._description.config(self.tensor_names())

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def tokenizer_source(self) -> TokenizerMetadata:
        metadata = self._file.metadata
        keys = {key: value for key, value in metadata.items() if key.startswith(("tokenizer.", "general.arch"))}
        return TokenizerMetadata(keys, keys.get("tokenizer.chat_template"))

    def tensor_names(self) -> frozenset[str]:
        return frozenset(self._places)

    def stored(self, name: str) -> Stored:
        """Integers in groups stay so; all other types are dequantized."""
        found = self._file.grouped(*self._place(name))
        if found is None:
            return StoredTensor(self.tensor(name), "F32")
        heads = self._rotated_heads(name)
        return found if heads is None else _reordered(found, _half_rotation(np.arange(found.values.shape[0]), heads))

    def stored_part(self, name: str, part: Part) -> Stored:
        if len(part.shape) == 1:
            return self.stored(name).part(part, name)
        found, heads = self._file.cut(*self._place(name), part), self._rotated_heads(name)
        if heads is None:
            return found
        rows = np.arange(found.values.shape[0])
        order = _half_rotation(rows, heads * len(rows) // part.shape[0])  # of whole heads: none of them is cut
        if isinstance(found, GroupedTensor):
            return _reordered(found, order)
        return replace(found, values=found.values[order])

    def tensor(self, name: str) -> FloatArray:
        place = self._place(name)
        values = self._file.tensor(*place)
        if SHARED_GATE in place[0]:
            values = values.reshape(1, -1)  # llama.cpp drops what has one row
        if self._files.norms_from_one and name.endswith("norm.weight"):
            values = values - np.float32(1)
        heads = self._rotated_heads(name)
        return values if heads is None else _half_rotation(values, heads)

    def kv_scales(self, layer: int) -> tuple[float, float]:
        return 1.0, 1.0

    def _place(self, name: str) -> Place:
        if name not in self._places:
            raise ModelCorrupt(f"{self.path} has no tensor {name}; use another file of this model")
        return self._places[name]

    def _rotated_heads(self, name: str) -> int | None:
        """Number of heads of q or k, where llama.cpp rotates them its own way; None: there is nothing to put back."""
        if not self._files.gguf_rotates_neighbours:
            return None
        return self.config.num_heads if ".q_proj." in name else self.config.num_kv_heads if ".k_proj." in name else None

    def _of(self, name: str) -> Iterator[tuple[str, Place]]:
        """Hugging Face's names of what one tensor of the file holds."""
        if name in TOP_LEVEL:
            yield TOP_LEVEL[name], (name, None)
            return
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        part = self._parts.get(match[2]) if match else None
        # A tensor nobody reads would make the model silently wrong.
        if match is None or part is None or (match[3] == "bias" and not part.startswith("self_attn.")):
            raise self._description.unsupported(
                f"tensor {name} is not part of a {self._files.gguf_name or 'llama'} model as we know it"
            )
        whole = f"model.layers.{match[1]}.{part}.{match[3]}"
        if "{expert}" not in whole:
            yield whole, (name, None)
            return
        for expert in range(self._file.tensors[name].shape[0]):
            yield whole.format(expert=expert), (name, expert)


def _expert_parts(names: ExpertNames | None) -> dict[str, str]:
    if names is None:
        return {}
    shared = {f"ffn_{part}_shexp": f"{names.block}.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
    parts = {"gate": names.gate, "up": names.up, "down": names.down}
    return {
        "ffn_gate_inp": f"{names.block}.gate",
        SHARED_GATE: f"{names.block}.shared_expert_gate",
        **shared,
        **{f"ffn_{part}_exps": f"{names.block}.experts.{{expert}}.{theirs}" for part, theirs in parts.items()},
    }


def _is_rope_table(name: str) -> bool:
    """Tables derived from the config; the factors are read with the config."""
    return name in ROPE_TABLES or name.endswith(".attn_rot_embd.weight")


def _reordered(weight: GroupedTensor, rows: npt.NDArray[np.int64]) -> GroupedTensor:
    minimums = weight.minimums and StoredTensor(weight.minimums.values[rows], weight.minimums.format)
    scales = StoredTensor(weight.scales.values[rows], weight.scales.format)
    return replace(weight, values=weight.values[rows], scales=scales, minimums=minimums)


def _half_rotation(rows: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """llama.cpp rotates neighbours (0,1), (2,3), …; Hugging Face rotates halves (0,d/2), (1,d/2+1), …
    Each head's rows are put back into the latter order."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])  # [heads, head_dim / 2, 2, ...]
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
