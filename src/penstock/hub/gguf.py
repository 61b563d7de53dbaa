"""A GGUF file as a checkpoint: llama.cpp's names, shapes and row order turned into Hugging Face's."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.errors import ModelCorrupt, ModelUnsupported
from penstock.core.model_config import ModelConfig, RopeScaling
from penstock.core.tokenizer_source import TokenizerMetadata
from penstock.hub.families import FAMILY_FILES
from penstock.hub.gguf_file import GGUFFile
from penstock.hub.quantization import Quantization
from penstock.hub.stored import FloatArray, GroupedTensor, Stored, StoredTensor

ARCHITECTURES = tuple(name for name, files in FAMILY_FILES.items() if files.has_gguf_name)
ROPE_FACTORS = "rope_freqs.weight"  # what Llama 3's rope scaling becomes
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


# How integers are kept: in as many bits, or in 8.
_KEPT_AS: dict[str, Quantization] = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), "int4"),
    **dict.fromkeys(("Q5_0", "Q5_1", "Q8_0", "Q5_K", "Q6_K"), "int8"),
}


class GGUFCheckpoint:
    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        self._metadata = self._file.metadata
        self._architecture = self._check_supported()
        # Hugging Face's name -> the file's
        self._names = {self._hf_name(name): name for name in self._file.tensors if not _is_rope_table(name)}
        try:
            self._config = self._read_config()
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ModelCorrupt(f"the metadata of {path} makes no sense ({error}); download it again") from None

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def tokenizer_source(self) -> TokenizerMetadata:
        keys = {key: value for key, value in self._metadata.items() if key.startswith("tokenizer.")}
        return TokenizerMetadata(keys, keys.get("tokenizer.chat_template"))

    def tensor_names(self) -> frozenset[str]:
        return frozenset(self._names)

    def stored(self, name: str) -> Stored:
        """Integers in groups stay so; all other types are dequantized."""
        found = self._file.grouped(self._name(name))
        if found is None:
            return StoredTensor(self.tensor(name), "F32")
        heads = self._rotated_heads(name)
        return found if heads is None else _reordered(found, _half_rotation(np.arange(found.values.shape[0]), heads))

    def tensor(self, name: str) -> FloatArray:
        values = self._file.tensor(self._name(name))
        heads = self._rotated_heads(name)
        return values if heads is None else _half_rotation(values, heads)

    def _name(self, name: str) -> str:
        if name not in self._names:
            raise ModelCorrupt(f"{self.path} has no tensor {name}; use another file of this model")
        return self._names[name]

    def _rotated_heads(self, name: str) -> int | None:
        """Of q and k, where llama.cpp rotates them its own way; None: there is nothing to put back."""
        if not FAMILY_FILES[self._architecture].gguf_rotates_neighbours:
            return None
        return self.config.num_heads if ".q_proj." in name else self.config.num_kv_heads if ".k_proj." in name else None

    def kv_scales(self, layer: int) -> tuple[float, float]:
        return 1.0, 1.0

    def _read_config(self) -> ModelConfig:
        hidden_size = self._required("embedding_length")
        num_heads = self._same_in_all_layers("attention.head_count")
        num_layers = self._required("block_count")
        head_dim = self._key("attention.key_length", hidden_size // num_heads)
        self._reject_partial_heads(head_dim)
        window = self._key("attention.sliding_window") or None
        names = self.tensor_names()
        return ModelConfig(
            # A llama with a window is what Hugging Face calls a Mistral.
            architecture="mistral" if window and self._architecture == "llama" else self._architecture,
            vocab_size=self._file.tensors["token_embd.weight"].shape[0],
            hidden_size=hidden_size,
            intermediate_size=self._same_in_all_layers("feed_forward_length"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=self._same_in_all_layers("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            context_length=self._required("context_length"),
            norm_eps=self._required("attention.layer_norm_rms_epsilon"),
            rope_theta=self._key("rope.freq_base", 10_000.0),
            rope_scaling=self._rope_scaling(),
            tied_embeddings="lm_head.weight" not in names,
            attention_bias="model.layers.0.self_attn.q_proj.bias" in names,
            output_bias="model.layers.0.self_attn.o_proj.bias" in names,
            windows=(window,) * num_layers if window else (),
            eos_token_ids=self._end_tokens(),
            bos_token_id=self._metadata.get("tokenizer.ggml.bos_token_id"),
            quantization=self._quantization(),
        )

    def _quantization(self) -> Quantization | None:
        """Of most bytes of the linear layers."""
        sizes: dict[Quantization | None, int] = {"int4": 0, "int8": 0, None: 0}
        for name, info in self._file.tensors.items():
            if name.startswith("blk.") and len(info.shape) == 2:
                sizes[_KEPT_AS.get(info.type.name)] += info.num_bytes
        return max(sizes, key=lambda kind: sizes[kind])

    def _check_supported(self) -> str:
        architecture = self._metadata.get("general.architecture")
        if architecture not in ARCHITECTURES:
            raise self._unsupported(f"its architecture is {architecture!r}; supported: {', '.join(ARCHITECTURES)}")
        if self._metadata.get("split.count", 1) > 1:
            raise self._unsupported("it is one part of a split model; merge the parts with `llama-gguf-split --merge`")
        if self._metadata.get(f"{architecture}.expert_count", 0) > 0:
            raise self._unsupported("it is a mixture of experts; only dense models are supported")
        for name in TOP_LEVEL.keys() - {"output.weight"} - self._file.tensors.keys():
            raise ModelCorrupt(f"{self.path} has no tensor {name}; use another file of this model")
        return str(architecture)

    def _hf_name(self, name: str) -> str:
        if name in TOP_LEVEL:
            return TOP_LEVEL[name]
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        part = IN_BLOCK.get(match[2]) if match else None
        # A tensor nobody reads would make the model silently wrong.
        if match is None or part is None or (match[3] == "bias" and not part.startswith("self_attn.")):
            raise self._unsupported(f"tensor {name} is not part of a {self._architecture} model as we know it")
        return f"model.layers.{match[1]}.{part}.{match[3]}"

    def _key(self, name: str, default: Any = None) -> Any:
        return self._metadata.get(f"{self._architecture}.{name}", default)

    def _required(self, name: str) -> Any:
        value = self._key(name)
        if not value:
            raise ModelCorrupt(f"{self.path} does not say its {self._architecture}.{name}; use another file")
        return value

    def _same_in_all_layers(self, name: str, default: Any = None) -> int:
        value = self._required(name) if default is None else self._key(name, default)
        values = set(value) if isinstance(value, list) else {value}
        if len(values) > 1:
            raise self._unsupported(f"{name} differs between layers")
        return int(values.pop())

    def _reject_partial_heads(self, head_dim: int) -> None:
        for name in ("attention.value_length", "rope.dimension_count"):
            if self._key(name, head_dim) != head_dim:
                raise self._unsupported(f"{name} is {self._key(name)}, not the head size {head_dim}")

    def _rope_scaling(self) -> RopeScaling | None:
        factor = self._key("rope.scaling.factor") or self._key("rope.scale_linear") or 1.0
        kind = self._key("rope.scaling.type", "linear" if factor != 1.0 else "none")
        has_factors = ROPE_FACTORS in self._file.tensors
        if kind == "none" and has_factors:
            return RopeScaling("factors", factors=tuple(self._file.tensor(ROPE_FACTORS).tolist()))
        if kind == "none":
            return None
        if kind == "linear" and not has_factors:
            return RopeScaling("linear", factor=factor)
        raise self._unsupported(f"rope scaling {kind!r}; supported: none, linear, or a table of factors (Llama 3)")

    def _end_tokens(self) -> tuple[int, ...]:
        ids = (self._metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
        return tuple(dict.fromkeys(id for id in ids if id is not None))

    def _unsupported(self, reason: str) -> ModelUnsupported:
        return ModelUnsupported(f"{self.path} cannot be served: {reason}")


def _is_rope_table(name: str) -> bool:
    """Tables derived from the config; the factors are read with the config."""
    return name == ROPE_FACTORS or name.endswith(".attn_rot_embd.weight")


def _reordered(weight: GroupedTensor, rows: npt.NDArray[np.int64]) -> GroupedTensor:
    minimums = weight.minimums and StoredTensor(weight.minimums.values[rows], weight.minimums.format)
    scales = StoredTensor(weight.scales.values[rows], weight.scales.format)
    return replace(weight, values=weight.values[rows], scales=scales, minimums=minimums)


def _half_rotation(rows: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """llama.cpp rotates neighbours (0,1), (2,3), …; Hugging Face rotates halves (0,d/2), (1,d/2+1), …
    Each head's rows are put back into the latter order."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])  # [heads, head_dim / 2, 2, ...]
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
