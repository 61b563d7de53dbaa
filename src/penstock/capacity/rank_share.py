"""The part of a model that one rank has: a model of the same form with fewer heads, tokens and experts, so all that is
known of models in bytes and operations holds for it. It knows no tensors: `model.shard` cuts those.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.core.model_config import Experts, LinearAttention, ModelConfig
from penstock.core.parallelism import Parallelism


def rank_config(config: ModelConfig, parallelism: Parallelism) -> ModelConfig:
    """The shape of the largest rank's part: the others wait for it. Layers are those of all stages of a pipeline.

    Norms and routers are whole on every rank. Of experts that are shared out a rank has fewer, and the router's rows
    for the others are not counted.
    """
    tp = parallelism.tp
    if tp == 1:
        return config
    kv_heads = max(1, _share(config.num_kv_heads, tp // parallelism.sp))  # of which it keeps one token in `sp`
    # Queries follow their keys; where several ranks have the same keys, they share these queries evenly.
    group = config.num_heads // config.num_kv_heads
    follow_keys = tp <= config.num_kv_heads and parallelism.sp == 1
    heads = kv_heads * group if follow_keys else _share(config.num_heads, tp)
    return replace(
        config,
        num_heads=heads,
        num_kv_heads=kv_heads,
        intermediate_size=_share(config.intermediate_size, tp),
        vocab_size=_share(config.vocab_size, tp),
        experts=_rank_experts(config.experts, parallelism) if config.experts is not None else None,
        linear=_rank_linear(config.linear, tp) if config.linear is not None else None,
    )


def _rank_linear(linear: LinearAttention, tp: int) -> LinearAttention:
    served, keys = linear.num_value_heads // linear.num_key_heads, _share(linear.num_key_heads, tp)
    return replace(linear, num_key_heads=keys, num_value_heads=keys * served)


def _rank_experts(experts: Experts, parallelism: Parallelism) -> Experts:
    shared = _share(experts.shared_intermediate_size, parallelism.tp)
    if parallelism.ep == 1:
        cut = _share(experts.intermediate_size, parallelism.tp)
        return replace(experts, intermediate_size=cut, shared_intermediate_size=shared)
    count = _share(experts.count, parallelism.ep)
    return replace(experts, count=count, per_token=min(experts.per_token, count), shared_intermediate_size=shared)


def _share(count: int, size: int) -> int:
    return -(-count // size)
