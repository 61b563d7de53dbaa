"""Shapes of an image encoder's tensors, by name: a checkpoint of random numbers has these."""

from __future__ import annotations

from penstock.core.model_config import ModelConfig, VisionConfig

Shapes = dict[str, tuple[int, ...]]


def vision_shapes(config: ModelConfig) -> Shapes:
    vision = config.vision
    if vision is None:
        return {}
    made = {"idefics3": _idefics3, "qwen2_5_vl": _qwen2_5, "qwen3_vl": _qwen3}[vision.family]
    return made(vision, config.hidden_size)


def _idefics3(vision: VisionConfig, decoder: int) -> Shapes:
    hidden, ffn, side = vision.hidden_size, vision.intermediate_size, vision.patch_size
    shapes: Shapes = {
        "vision.embeddings.patch_embedding.weight": (hidden, 3, side, side),
        "vision.embeddings.patch_embedding.bias": (hidden,),
        "vision.embeddings.position_embedding.weight": ((vision.image_size // side) ** 2, hidden),
        **_affine("vision.post_layernorm", (hidden,)),
        "connector.modality_projection.proj.weight": (decoder, hidden * vision.merge_size**2),
    }
    for layer in range(vision.num_layers):
        at = f"vision.encoder.layers.{layer}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= _affine(f"{at}.self_attn.{part}", (hidden, hidden))
        for norm in ("layer_norm1", "layer_norm2"):
            shapes |= _affine(f"{at}.{norm}", (hidden,))
        shapes |= _affine(f"{at}.mlp.fc1", (ffn, hidden)) | _affine(f"{at}.mlp.fc2", (hidden, ffn))
    return shapes


def _qwen2_5(vision: VisionConfig, decoder: int) -> Shapes:
    hidden, ffn, merged = vision.hidden_size, vision.intermediate_size, vision.hidden_size * vision.merge_size**2
    shapes: Shapes = {
        "vision.patch_embed.proj.weight": (hidden, 3, vision.temporal_patch_size, vision.patch_size, vision.patch_size),
        "vision.merger.ln_q.weight": (hidden,),
        **_affine("vision.merger.mlp.0", (merged, merged)),
        **_affine("vision.merger.mlp.2", (decoder, merged)),
    }
    for layer in range(vision.num_layers):
        at = f"vision.blocks.{layer}"
        shapes |= {f"{at}.norm1.weight": (hidden,), f"{at}.norm2.weight": (hidden,)}
        shapes |= _affine(f"{at}.attn.qkv", (3 * hidden, hidden)) | _affine(f"{at}.attn.proj", (hidden, hidden))
        for part in ("gate_proj", "up_proj"):
            shapes |= _affine(f"{at}.mlp.{part}", (ffn, hidden))
        shapes |= _affine(f"{at}.mlp.down_proj", (hidden, ffn))
    return shapes


def _qwen3(vision: VisionConfig, decoder: int) -> Shapes:
    hidden, ffn, merged = vision.hidden_size, vision.intermediate_size, vision.hidden_size * vision.merge_size**2
    patch = (3, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    shapes: Shapes = {
        "vision.patch_embed.proj.weight": (hidden, *patch),
        "vision.patch_embed.proj.bias": (hidden,),
        "vision.pos_embed.weight": (vision.position_side**2, hidden),
    }
    stacked = {f"vision.deepstack_merger_list.{place}": (merged,) for place in range(len(vision.stacked_layers))}
    for at, norm in {"vision.merger": (hidden,), **stacked}.items():
        shapes |= _affine(f"{at}.norm", norm)
        shapes |= _affine(f"{at}.linear_fc1", (merged, merged)) | _affine(f"{at}.linear_fc2", (decoder, merged))
    for layer in range(vision.num_layers):
        at = f"vision.blocks.{layer}"
        shapes |= _affine(f"{at}.norm1", (hidden,)) | _affine(f"{at}.norm2", (hidden,))
        shapes |= _affine(f"{at}.attn.qkv", (3 * hidden, hidden)) | _affine(f"{at}.attn.proj", (hidden, hidden))
        shapes |= _affine(f"{at}.mlp.linear_fc1", (ffn, hidden)) | _affine(f"{at}.mlp.linear_fc2", (hidden, ffn))
    return shapes


def _affine(path: str, shape: tuple[int, ...]) -> Shapes:
    return {f"{path}.weight": shape, f"{path}.bias": shape[:1]}
