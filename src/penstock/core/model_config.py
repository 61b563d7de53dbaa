"""The shape of a decoder-only transformer, whatever file it came from. No torch, no file formats."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from penstock.core.images import ImageInput

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")

INT8_KV_SCALE_BYTES = 2  # of a key or a value of one head, in a cache of 8-bit integers


@dataclass(frozen=True)
class RopeScaling:
    """Rotary embeddings stretched beyond the length they were trained for."""

    kind: Literal["linear", "llama3", "factors", "longrope", "yarn"]
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_context: int = 8192  # llama3, longrope, yarn
    factors: tuple[float, ...] = ()  # GGUF's form: what each frequency is divided by; longrope: in the original context
    long_factors: tuple[float, ...] = ()  # longrope: what it is divided by where contexts may be longer than that
    magnitude: float = 1.0  # longrope, yarn: what is rotated is multiplied by it
    beta_fast: float = 32.0  # yarn: pairs that turn more often than this in the original context are left alone
    beta_slow: float = 1.0  # yarn: those that turn less often are slowed by the whole factor
    truncate: bool = True  # yarn: the pairs between are counted in whole numbers


@dataclass(frozen=True)
class ClampedSwiGLU:
    """gpt-oss's gate: min(gate, limit) * sigmoid(alpha * gate) * (up + 1), with up between -limit and limit."""

    alpha: float = 1.702
    limit: float = 7.0


# Activation of an MLP's gate, before it is multiplied with the rest; gelu is the tanh form.
Activation = Literal["silu", "gelu"] | ClampedSwiGLU


@dataclass(frozen=True)
class Routing:
    """DeepSeek's routing: experts are chosen by score, from the best groups of neighbouring experts."""

    scores: Literal["softmax", "sigmoid"] = "sigmoid"
    has_bias: bool = True  # a number of each expert's own, added to its score for the choice and not for the weight
    num_groups: int = 1
    groups_per_token: int = 1
    group_score: Literal["best two", "best"] = "best two"  # the sum of a group's two best scores, or its best
    scale: float = 1.0  # factor of the chosen experts' weights


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: in place of one MLP a layer has many, and a router picks a few of them for each token."""

    count: int
    per_token: int
    intermediate_size: int  # of each
    normalized: bool = True  # the weights of a token's experts sum to one
    shared_intermediate_size: int = 0  # of one expert more that every token passes, with a gate of its own; 0: none
    dense_layers: tuple[int, ...] = ()  # layers that have a plain MLP all the same
    has_biases: bool = False  # the router and all linears of each expert
    activation: Activation = "silu"
    shared_gate: bool = True  # the expert that all tokens pass has a gate of its own; else it is added as it is
    routing: Routing | None = None  # None: the largest logits are chosen


@dataclass(frozen=True)
class AttentionTemperature:
    """Queries grow with their position: by 1 + scale * ln(1 + (position + first) // tokens)."""

    scale: float = 0.1
    tokens: int = 8192
    first: int = 1  # number of the first position


@dataclass(frozen=True)
class LinearAttention:
    """Layers with a recurrent state in place of keys and values (gated DeltaNet): what a sequence leaves behind in one
    is of the same size however long the sequence is."""

    layers: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int  # each key head serves as many of them, side by side
    key_dim: int  # of each head of queries and keys
    value_dim: int
    kernel_size: int  # tokens that the causal convolution before the heads sees, the newest included

    @property
    def keys_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def values_size(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Channels that are convolved: queries, keys and values."""
        return 2 * self.keys_size + self.values_size

    @property
    def state_values(self) -> int:
        """Numbers of one layer's state of one sequence: the delta rule's matrices and the convolution's last inputs."""
        return self.values_size * self.key_dim + self.num_channels * (self.kernel_size - 1)

    def num_parameters(self, hidden_size: int) -> int:
        """Parameters of one layer, without its norms before and behind."""
        projections = self.num_channels + 2 * self.values_size + 2 * self.num_value_heads  # gates, output
        return hidden_size * projections + self.num_channels * self.kernel_size + 2 * self.num_value_heads


STATE_VALUE_BYTES = 4  # states are float32 whatever activations are: they are added to at every token


@dataclass(frozen=True)
class StoredGroups:
    """Inputs of a linear that share a scale in the model's files: a rank has whole groups, or none."""

    size: int
    is_ordered: bool = False  # inputs are stored in an order of importance (act-order), so they cannot be split at all


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (MLA): a token's keys and values of all heads are made of one small vector, the
    latent, and of one rotated key that all heads share. The cache holds these two."""

    rank: int  # the latent's size (kv_lora_rank)
    query_rank: int | None  # queries are made of a vector of this size (q_lora_rank); None: of the stream itself
    plain_dim: int  # the part of a head's query and key that is not rotated (qk_nope_head_dim)
    rotary_dim: int  # the part that is rotated (qk_rope_head_dim); all heads share that of the key
    value_dim: int  # size of a head's value (v_head_dim)
    interleaved: bool = (
        True  # dimensions that turn together are neighbours in the files; else half the rotated part apart
    )

    @property
    def cached_dim(self) -> int:
        """Numbers of a token that are cached in a layer."""
        return self.rank + self.rotary_dim

    @property
    def query_dim(self) -> int:
        """Size of a head's query before the key's weights are absorbed into it."""
        return self.plain_dim + self.rotary_dim

    def parameters(self, hidden_size: int, num_heads: int) -> int:
        """Parameters of a layer's attention, without its norms."""
        queries = num_heads * self.query_dim
        made = self.query_rank * (hidden_size + queries) if self.query_rank else hidden_size * queries
        up = self.rank * num_heads * (self.plain_dim + self.value_dim)
        return made + hidden_size * self.cached_dim + up + num_heads * self.value_dim * hidden_size


@dataclass(frozen=True)
class VisionConfig:
    """The encoder of images in front of a decoder. The form of its images is the family's affair."""

    family: Literal["idefics3", "qwen2_5_vl", "qwen3_vl"]
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int  # pixels of a patch's side
    merge_size: int  # so many patches by so many become one token
    image_size: int = 0  # idefics3: pixels of each image's side
    temporal_patch_size: int = 1  # qwen*: frames of a patch; an image is repeated
    window_size: int = 0  # qwen2_5_vl: pixels of a window's side
    full_layers: tuple[int, ...] = ()  # qwen2_5_vl: layers that see the whole image, not a window
    position_side: int = 0  # qwen3_vl: of the square of learned positions that is stretched over an image's patches
    stacked_layers: tuple[int, ...] = ()  # qwen3_vl: whose results are added behind the decoder's first layers
    norm_eps: float = 1e-6

    @property
    def levels(self) -> int:
        """Vectors that the encoder makes of a token: the one in place of its embedding, and those that are added."""
        return 1 + len(self.stacked_layers)

    @property
    def patch_values(self) -> int:
        """Numbers of a patch: three colours of each pixel."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    def num_parameters(self, hidden_size: int) -> int:
        """`hidden_size`: of the decoder."""
        hidden, merged = self.hidden_size, self.hidden_size * self.merge_size**2
        mlps = 3 if self.family == "qwen2_5_vl" else 2
        layers = self.num_layers * (4 * hidden * hidden + mlps * hidden * self.intermediate_size)
        if self.family != "idefics3":
            mergers = self.levels * merged * (merged + hidden_size)
            return layers + (self.patch_values + self.position_side**2) * hidden + mergers
        positions = (self.image_size // self.patch_size) ** 2
        return layers + (self.patch_values + positions) * hidden + merged * hidden_size

    def problem(self, image: ImageInput) -> str | None:
        """Reason why the encoder cannot take an image as it is described; None: it can."""
        if len(image.grid) != 3 or min(image.grid) < 1 or image.num_tokens < 1:
            return f"its grid is {image.grid}"
        if len(image.values) != 4 * math.prod(image.shape):
            return f"it has {len(image.values)} bytes of values for a shape of {image.shape}"
        if self.family == "idefics3":
            return self._problem_of_square(image)
        frames, rows, columns = image.grid
        if frames != 1 or rows % self.merge_size or columns % self.merge_size:
            return f"a grid of {image.grid} patches cannot be merged by {self.merge_size}"
        if image.num_tokens != rows * columns // self.merge_size**2:
            return f"it has {image.num_tokens} tokens for a grid of {image.grid}"
        if image.shape != [rows * columns, self.patch_values]:
            return f"its values are {image.shape}, not {[rows * columns, self.patch_values]}"
        return None

    def _problem_of_square(self, image: ImageInput) -> str | None:
        side = self.image_size // self.patch_size
        if image.shape != [3, self.image_size, self.image_size]:
            return f"its values are {image.shape}, not {[3, self.image_size, self.image_size]}"
        if image.num_tokens != (side // self.merge_size) ** 2:
            return f"it has {image.num_tokens} tokens, not {(side // self.merge_size) ** 2}"
        return None


@dataclass(frozen=True)
class ModelConfig:
    architecture: str  # the family's name, a key of `hub.families.FAMILY_FILES`
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    attention_bias: bool = False  # biases on q, k and v (Qwen2)
    output_bias: bool = False  # bias on the attention's output projection too
    attention_sinks: bool = False  # each head has a score of its own that takes its share of attention, for no value
    windows: tuple[int | None, ...] = ()  # per layer: how many tokens back it sees; empty: all of them
    in_chunks: bool = False  # windows begin at multiples of their length: see `AttentionSpec.in_chunks`
    unrotated_layers: tuple[int, ...] = ()  # layers without rotary embeddings (NoPE)
    temperature: AttentionTemperature | None = None  # Llama 4: of those; Ministral 3: of all. None: of no layer
    head_norms: bool = True  # whether queries and keys of rotated layers are normed, in families whose config says so
    local_rope_theta: float | None = None  # of layers that see a window, where it is another and nothing is scaled
    rotary_dim: int | None = None  # the first so many dimensions of a head are rotated; None: all
    query_scale: float | None = None  # of attention scores; None: one over the root of the head size
    attention_cap: float | None = None  # scores are kept within it, by a tanh
    logit_cap: float | None = None  # so are logits
    activation: Literal["silu", "gelu"] = "silu"  # of the MLP's gate; gelu is the tanh form
    norm_offset: float = 0.0  # added to the norms' weights: Gemma's count from one
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # factor of what attention and MLP add to the stream (Granite): see `stream_scale`
    logit_divisor: float = 1.0  # logits are divided by it
    output_gate: bool = False  # heads' outputs are multiplied by the sigmoid of a gate projected beside the queries
    linear: LinearAttention | None = None  # linear attention's layers; None: there are none
    experts: Experts | None = None
    # None: heads have keys and values of their own. Else there is one head of keys, and `head_dim` is its cached size.
    latent: LatentAttention | None = None
    vision: VisionConfig | None = None  # None: it takes no images
    # Numbers of a head's frequencies that turn with the time, the row and the column of an image's token; (): all turn
    # with its position.
    rope_sections: tuple[int, ...] = ()
    rope_interleaved: bool = False  # these take turns, from the fastest on; else they lie behind each other
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    # Format of most linear layers' weights, where the file has them smaller: see `EngineSettings.quant`.
    quantization: Literal["fp8", "int8", "int4", "w8a8", "mxfp4"] | None = None

    @property
    def stream_scale(self) -> float:
        """Factor of embeddings, where the residual stream is kept divided by `residual_scale`: layers then add to it
        unscaled, and norms see no difference, but for their epsilon."""
        return self.embedding_scale / self.residual_scale

    @property
    def stream_eps(self) -> float:
        """Epsilon of norms over the stream that `stream_scale` divides."""
        return self.norm_eps / self.residual_scale**2

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    @property
    def cached_value_dim(self) -> int | None:
        """Values are the first so many numbers of what is cached as keys; None: they are cached beside them."""
        return self.latent.rank if self.latent is not None else None

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers

    def is_linear(self, layer: int) -> bool:
        return self.linear is not None and layer in self.linear.layers

    @property
    def num_attention_layers(self) -> int:
        """Number of layers with keys and values in the cache."""
        return self.num_layers - (len(self.linear.layers) if self.linear is not None else 0)

    @property
    def state_bytes(self) -> int:
        """Memory of one sequence's recurrent state, in all layers; 0: it has none."""
        return len(self.linear.layers) * self.linear.state_values * STATE_VALUE_BYTES if self.linear is not None else 0

    @property
    def num_parameters(self) -> int:
        return self._parameters(self.experts.count if self.experts else 0)

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that one token passes; of a mixture, only a few experts'."""
        return self._parameters(self.experts.per_token if self.experts else 0)

    @property
    def num_expert_parameters(self) -> int:
        """Number of parameters of all routed experts, in all layers: a step reads a part of them."""
        if self.experts is None:
            return 0
        num_layers = sum(self.has_experts(layer) for layer in range(self.num_layers))
        return num_layers * self.experts.count * 3 * self.hidden_size * self.experts.intermediate_size

    def _parameters(self, num_experts: int) -> int:
        """Number of parameters with so many experts in each layer that has any."""
        heads = (3 if self.output_gate else 2) * self.num_heads + 2 * self.num_kv_heads
        attention = self.num_attention_layers * self.hidden_size * self.head_dim * heads
        if self.latent is not None:
            attention = self.num_layers * self.latent.parameters(self.hidden_size, self.num_heads)
        if self.linear is not None:
            attention += len(self.linear.layers) * self.linear.num_parameters(self.hidden_size)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        mlps = sum(self._mlp_parameters(layer, num_experts) for layer in range(self.num_layers))
        return attention + 2 * self.num_layers * self.hidden_size + mlps + embeddings + self.hidden_size

    def _mlp_parameters(self, layer: int, num_experts: int) -> int:
        experts = self.experts
        if experts is None or not self.has_experts(layer):
            return 3 * self.hidden_size * self.intermediate_size
        widths = num_experts * experts.intermediate_size + experts.shared_intermediate_size
        has_gate = experts.shared_intermediate_size > 0 and experts.shared_gate
        router = self.hidden_size * (experts.count + has_gate)
        return 3 * self.hidden_size * widths + router

    def kv_bytes_per_token(self, bytes_per_value: int, bytes_per_scale: int = 0) -> int:
        """A key or a value of a head may have a scale."""
        caches = 1 if self.latent is not None else 2
        heads = caches * self.num_attention_layers * self.num_kv_heads
        return heads * (self.head_dim * bytes_per_value + bytes_per_scale)


def check_sizes(config: ModelConfig) -> ModelConfig:
    """The config itself, if its sizes can be those of a model: kernels divide by them. Raises ValueError."""
    for name in _SIZES:
        if not isinstance(size := getattr(config, name), int) or size < 1:
            raise ValueError(f"{name} is {size!r}, and must be a positive whole number")
    if config.num_heads % config.num_kv_heads:
        raise ValueError(f"{config.num_heads} heads of queries cannot share {config.num_kv_heads} heads of keys evenly")
    if config.linear is not None:
        _check_linear(config.linear, config)
    return config


def _check_linear(linear: LinearAttention, config: ModelConfig) -> None:
    for name in ("num_key_heads", "num_value_heads", "key_dim", "value_dim"):
        if not isinstance(size := getattr(linear, name), int) or size < 1:
            raise ValueError(f"{name} of its linear attention is {size!r}, and must be a positive whole number")
    if not isinstance(linear.kernel_size, int) or linear.kernel_size < 2:
        raise ValueError(f"the convolution of its linear attention has a kernel of {linear.kernel_size!r}")
    if linear.num_value_heads % linear.num_key_heads:
        raise ValueError(
            f"{linear.num_value_heads} value heads of linear attention cannot share {linear.num_key_heads} heads of "
            "keys evenly"
        )
    if not linear.layers or not config.num_attention_layers:
        raise ValueError("all of its layers are of one kind, and both linear and full attention are expected")
