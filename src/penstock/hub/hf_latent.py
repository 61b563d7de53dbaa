"""DeepSeek's keys of config.json: multi-head latent attention, and routers that choose groups of experts.

They are read by the rules of transformers. A value that would change the results and is not understood is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from penstock.core.errors import ModelUnsupported
from penstock.core.model_config import Experts, LatentAttention, Routing
from penstock.hub.hf_rope import rope_parameters, yarn_magnitude

Json = Mapping[str, Any]

log = logging.getLogger("penstock.hub")


def latent_attention(values: Json) -> LatentAttention:
    if values.get("attention_bias"):
        raise ModelUnsupported("its attention has biases (attention_bias), which latent attention here has not")
    if further := values.get("num_nextn_predict_layers"):
        log.info("layers that predict further tokens (MTP) are not used: the model has %d", further)
    query_rank = values["q_lora_rank"]
    found = LatentAttention(
        rank=int(values["kv_lora_rank"]),
        query_rank=None if query_rank is None else int(query_rank),
        plain_dim=int(values["qk_nope_head_dim"]),
        rotary_dim=int(values["qk_rope_head_dim"]),
        value_dim=int(values["v_head_dim"]),
        interleaved=bool(values.get("rope_interleave", True)),
    )
    if min(found.rank, found.query_rank or 1, found.plain_dim, found.value_dim) < 1 or found.rotary_dim < 2:
        raise ValueError(f"its latent attention has the sizes {found}")
    if found.rotary_dim % 2:
        raise ValueError(f"qk_rope_head_dim is {found.rotary_dim}, and must be even")
    return found


def query_scale(values: Json, latent: LatentAttention) -> float:
    """Scale of attention scores, from a head's size before absorption and YaRN's magnitude for long contexts."""
    rope, scale = rope_parameters(values), latent.query_dim**-0.5
    if rope.get("rope_type", rope.get("type", "default")) != "default" and (of_all := rope.get("mscale_all_dim")):
        scale *= yarn_magnitude(rope["factor"], of_all) ** 2
    return float(scale)


def grouped_experts(family: str, values: Json) -> Experts | None:
    """None: the model is no mixture."""
    if values["n_routed_experts"] is None:
        return None
    width, count = values["moe_intermediate_size"], values["n_routed_experts"]
    return Experts(
        count=count,
        per_token=values["num_experts_per_tok"],
        intermediate_size=width,
        normalized=bool(values["norm_topk_prob"]),
        shared_intermediate_size=width * (values["n_shared_experts"] or 0),
        dense_layers=_dense_layers(values),
        shared_gate=False,
        routing=_softmax_routing(values) if family == "deepseek_v2" else _sigmoid_routing(values, count),
    )


def _dense_layers(values: Json) -> tuple[int, ...]:
    layers = range(values["num_hidden_layers"])
    if types := values.get("mlp_layer_types"):
        return tuple(layer for layer in layers if types[layer] == "dense")
    every = values.get("moe_layer_freq", 1)
    return tuple(layer for layer in layers if layer < values["first_k_dense_replace"] or layer % every)


def _sigmoid_routing(values: Json, count: int) -> Routing:
    _require(values, scoring_func=("sigmoid",), topk_method=("noaux_tc",))
    groups, per_token = values["n_group"] or 1, values["topk_group"] or 1
    _check_groups(count, groups, per_token, least=2)
    return Routing("sigmoid", True, groups, per_token, "best two", values["routed_scaling_factor"])


def _softmax_routing(values: Json) -> Routing:
    # transformers scales weights and never normalizes them; DeepSeek's own code does one or the other.
    _require(values, scoring_func=("softmax",), topk_method=("greedy", "group_limited_greedy"), norm_topk_prob=(False,))
    groups, per_token = 1, 1
    if values["topk_method"] == "group_limited_greedy":
        groups, per_token = values["n_group"], values["topk_group"]
        _check_groups(values["n_routed_experts"], groups, per_token, least=1)
    return Routing("softmax", False, groups, per_token, "best", values["routed_scaling_factor"])


def _check_groups(count: int, groups: int, per_token: int, least: int) -> None:
    if groups < 1 or count % groups or not 1 <= per_token <= groups or count // groups < least:
        raise ValueError(f"{count} experts cannot be {groups} groups of which {per_token} are chosen")


def _require(values: Json, **allowed: tuple[Any, ...]) -> None:
    for key, known in allowed.items():
        if values[key] not in known:
            raise ModelUnsupported(f"its router has {key} {values[key]!r}; supported: {', '.join(map(str, known))}")
