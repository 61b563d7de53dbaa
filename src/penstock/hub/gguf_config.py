"""A GGUF file's metadata as a ModelConfig. Knows llama.cpp's keys, and what its code takes for granted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.core.errors import ModelCorrupt, ModelUnsupported
from penstock.core.model_config import Experts, ModelConfig, RopeScaling, check_sizes
from penstock.hub.families import FAMILY_FILES
from penstock.hub.family_config import window_pattern
from penstock.hub.gguf_file import GGUFFile
from penstock.hub.hf_rope import longrope_magnitude
from penstock.hub.quantization import Quantization

ARCHITECTURES = {files.gguf_name: name for name, files in FAMILY_FILES.items() if files.gguf_name}
EMBEDDING = "token_embd.weight"
ROPE_FACTORS = "rope_freqs.weight"  # what Llama 3's rope scaling becomes
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"  # Phi-3's
ROPE_TABLES = (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS)

# Integers are kept in as many bits, or in 8.
_KEPT_AS: dict[str, Quantization] = {
    **dict.fromkeys(("Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K"), "int4"),
    **dict.fromkeys(("Q5_0", "Q5_1", "Q8_0", "Q5_K", "Q6_K"), "int8"),
}
# The largest of each has heads of another size than its queries are scaled by, which the file does not say.
_LARGEST_GEMMA = {"gemma2": 46, "gemma3_text": 62}  # layers
_DIVIDES_BY_SUM = {"mixtral": True, "qwen2_moe": False, "qwen3_moe": True, "olmoe": False}
_GATES_BY_SOFTMAX = (None, 0, 1)


class GGUFDescription:
    """Description of a model by one file's metadata."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._metadata = file.metadata
        self._architecture = self._check_supported()
        self.family = self._family()

    def config(self, names: frozenset[str]) -> ModelConfig:
        """`names` are the tensors', as Hugging Face has them."""
        try:
            return check_sizes(replace(self._config(names), **self._scales()))
        except (TypeError, ValueError, ArithmeticError, LookupError) as error:
            message = f"the metadata of {self._file.path} makes no sense ({error}); download it again"
            raise ModelCorrupt(message) from None

    def unsupported(self, reason: str) -> ModelUnsupported:
        return ModelUnsupported(f"{self._file.path} cannot be served: {reason}")

    def _check_supported(self) -> str:
        architecture = self._metadata.get("general.architecture")
        if architecture not in ARCHITECTURES:
            raise self.unsupported(f"its architecture is {architecture!r}; supported: {', '.join(ARCHITECTURES)}")
        if self._metadata.get("split.count", 1) > 1:
            raise self.unsupported("it is one part of a split model; merge the parts with `llama-gguf-split --merge`")
        for name in {EMBEDDING, "output_norm.weight"} - self._file.tensors.keys():
            raise ModelCorrupt(f"{self._file.path} has no tensor {name}; use another file of this model")
        return str(architecture)

    def _family(self) -> str:
        """A llama with experts is what Hugging Face calls a Mixtral, one with a window a Mistral."""
        family = ARCHITECTURES[self._architecture]
        if family == "llama" and self._key("expert_count", 0):
            family = "mixtral"
        elif family == "llama" and self._key("attention.sliding_window"):
            family = "mistral"
        if self._key("rope.dimension_sections"):
            raise self.unsupported("its heads turn with images (rope.dimension_sections)")
        has_experts = any(".ffn_gate_exps." in name for name in self._file.tensors)
        if has_experts != (FAMILY_FILES[family].experts is not None):
            raise self.unsupported("it is a mixture of experts whose experts do not lie stacked (ffn_gate_exps)")
        return family

    def _config(self, names: frozenset[str]) -> ModelConfig:
        files = FAMILY_FILES[self.family]
        hidden_size = self._required("embedding_length")
        num_heads = self._same_in_all_layers("attention.head_count")
        head_dim = self._key("attention.key_length", hidden_size // num_heads)
        rotary_dim = self._rotary_dim(head_dim)
        return ModelConfig(
            architecture=self.family,
            vocab_size=self._file.tensors[EMBEDDING].shape[0],
            hidden_size=hidden_size,
            intermediate_size=self._intermediate_size(),
            num_layers=self._required("block_count"),
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
            windows=self._windows(),
            local_rope_theta=self._key("rope.freq_base_swa", files.hf_defaults.get("rope_local_base_freq")),
            rotary_dim=rotary_dim if rotary_dim < head_dim else None,
            query_scale=self._query_scale(hidden_size // num_heads, head_dim),
            attention_cap=self._cap("attn_logit_softcapping"),
            logit_cap=self._cap("final_logit_softcapping"),
            activation=files.activation,
            norm_offset=1.0 if files.norms_from_one else 0.0,
            embedding_scale=hidden_size**0.5 if files.scales_embedding else 1.0,
            experts=self._experts() if files.experts else None,
            eos_token_ids=self._end_tokens(),
            bos_token_id=self._metadata.get("tokenizer.ggml.bos_token_id"),
            quantization=self._quantization(),
        )

    def _intermediate_size(self) -> int:
        if not FAMILY_FILES[self.family].experts or self._key("feed_forward_length"):
            return self._same_in_all_layers("feed_forward_length")
        return self._file.tensors["blk.0.ffn_gate_exps.weight"].shape[1]  # no layer has another MLP

    def _windows(self) -> tuple[int | None, ...]:
        window, num_layers = self._key("attention.sliding_window") or None, self._required("block_count")
        files = FAMILY_FILES[self.family]
        if window is None:
            return ()
        if files.windows == "refused":
            raise self.unsupported("its layers see a window")
        if files.windows != "in a pattern":
            return (window,) * num_layers if window < self._required("context_length") else ()
        pattern = self._key("attention.sliding_window_pattern", files.hf_defaults["sliding_window_pattern"])
        if isinstance(pattern, list):
            return tuple(window if has_window else None for has_window in pattern)
        return tuple(window if kind == "sliding_attention" else None for kind in window_pattern(num_layers, pattern))

    def _query_scale(self, width_per_head: int, head_dim: int) -> float | None:
        if self.family not in _LARGEST_GEMMA:
            return None
        is_largest = self._required("block_count") == _LARGEST_GEMMA[self.family]
        return float((width_per_head if is_largest else head_dim) ** -0.5)

    def _scales(self) -> dict[str, Any]:
        if self.family == "smollm3":  # which its files do not say
            return {"unrotated_layers": tuple(range(3, self._required("block_count"), 4))}
        if self.family != "granite":
            return {}
        return {
            "embedding_scale": self._required("embedding_scale"),
            "query_scale": self._required("attention.scale"),
            "residual_scale": self._required("residual_scale"),
            "logit_divisor": self._required("logit_scale"),
        }

    def _cap(self, name: str) -> float | None:
        return self._key(name, FAMILY_FILES[self.family].hf_defaults.get(name)) or None

    def _experts(self) -> Experts:
        """Their sizes are read off the tensors: older files do not say them."""
        tensors, gating, scale = self._file.tensors, self._key("expert_gating_func"), self._key("expert_weights_scale")
        if gating not in _GATES_BY_SOFTMAX or scale not in (None, 0.0, 1.0):
            raise self.unsupported(f"its experts are weighed by function {gating}, scaled by {scale}")
        shared = tensors.get("blk.0.ffn_gate_shexp.weight")
        count, width, _ = tensors["blk.0.ffn_gate_exps.weight"].shape
        if count != self._required("expert_count"):
            raise ModelCorrupt(f"{self._file.path} has {count} experts, not {self._key('expert_count')}; use another")
        return Experts(
            count=count,
            per_token=self._required("expert_used_count"),
            intermediate_size=width,
            normalized=self._key("expert_weights_norm", _DIVIDES_BY_SUM[self.family]),
            shared_intermediate_size=shared.shape[0] if shared else 0,
        )

    def _rotary_dim(self, head_dim: int) -> int:
        if self._key("attention.value_length", head_dim) != head_dim:
            raise self.unsupported(f"its values are not of the head size {head_dim} (attention.value_length)")
        rotary_dim: int = self._key("rope.dimension_count", head_dim)
        if rotary_dim != head_dim and not FAMILY_FILES[self.family].rotates_a_part:
            raise self.unsupported(f"rope.dimension_count is {rotary_dim}, not the head size {head_dim}")
        return rotary_dim

    def _rope_scaling(self) -> RopeScaling | None:
        factor = self._key("rope.scaling.factor") or self._key("rope.scale_linear") or 1.0
        kind = self._key("rope.scaling.type", "linear" if factor != 1.0 else "none")
        tables = self._file.tensors.keys() & set(ROPE_TABLES)
        if tables == {SHORT_FACTORS, LONG_FACTORS} and kind in ("none", "longrope"):
            return self._longrope()
        if kind == "none" and tables == {ROPE_FACTORS}:
            return RopeScaling("factors", factors=self._table(ROPE_FACTORS))
        if kind == "none" and not tables:
            return None
        if kind == "linear" and not tables:
            return RopeScaling("linear", factor=factor)
        raise self.unsupported(
            f"rope scaling {kind!r}; supported: none, linear, or a table of factors (Llama 3, Phi-3)"
        )

    def _longrope(self) -> RopeScaling:
        context: int = self._required("context_length")
        original: int = self._key("rope.scaling.original_context_length") or context
        return RopeScaling(
            "longrope",
            original_context=original,
            factors=self._table(SHORT_FACTORS),
            long_factors=self._table(LONG_FACTORS),
            magnitude=self._key("rope.scaling.attn_factor") or longrope_magnitude(context / original, original),
        )

    def _table(self, name: str) -> tuple[float, ...]:
        return tuple(self._file.tensor(name).tolist())

    def _end_tokens(self) -> tuple[int, ...]:
        ids = [self._metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
        if ends := FAMILY_FILES[self.family].gguf_end_tokens:
            tokens = self._metadata.get("tokenizer.ggml.tokens", [])
            ids += [id for id, token in enumerate(tokens) if token in ends]
        return tuple(dict.fromkeys(id for id in ids if id is not None))

    def _quantization(self) -> Quantization | None:
        """Number format of most bytes of the linear layers."""
        sizes: dict[Quantization | None, int] = {"int4": 0, "int8": 0, None: 0}
        for name, info in self._file.tensors.items():
            if name.startswith("blk.") and len(info.shape) > 1:
                sizes[_KEPT_AS.get(info.type.name)] += info.num_bytes
        return max(sizes, key=lambda kind: sizes[kind])

    def _key(self, name: str, default: Any = None) -> Any:
        return self._metadata.get(f"{self._architecture}.{name}", default)

    def _required(self, name: str) -> Any:
        value = self._key(name)
        if not value:
            raise ModelCorrupt(f"{self._file.path} does not say its {self._architecture}.{name}; use another file")
        return value

    def _same_in_all_layers(self, name: str, default: Any = None) -> int:
        value = self._required(name) if default is None else self._key(name, default)
        values = set(value) if isinstance(value, list) else {value}
        if len(values) > 1:
            raise self.unsupported(f"{name} differs between layers")
        return int(values.pop())
