"""The cost of a mixture of experts beside a dense model of as many active weights: `python -m tools.experts_speed`.

Steps of decodes on the CPU, random weights, one thread; seconds are the process's own, so that a busy machine does not
count. A few tokens read more weights of the mixture, since each has its own experts; one token reads as many.
"""

from __future__ import annotations

import time

import torch

from penstock.core.model_config import Experts, ModelConfig
from penstock.model.batch import Batch
from penstock.model.layers import CausalLM
from penstock.model.loading import random_model
from penstock.model.ops import KVShape
from penstock.model.ops.native import NativeOps

DENSE = ModelConfig("qwen3", 4096, 768, 3072, 12, 12, 4, 64, 1024)
MIXTURE = ModelConfig("qwen3_moe", 4096, 768, 3072, 12, 12, 4, 64, 1024, experts=Experts(64, 8, 384))
ROWS = (1, 8, 64, 256)
CONTEXT, BLOCK, ROUNDS = 32, 32, 5


def decodes(rows: int) -> Batch:
    """Each sequence has one token after a context of its own block."""
    dice = torch.Generator().manual_seed(rows)
    return Batch(
        token_ids=torch.randint(0, DENSE.vocab_size, (rows,), dtype=torch.int32, generator=dice),
        positions=torch.full((rows,), CONTEXT - 1, dtype=torch.int32),
        query_starts=torch.arange(rows + 1, dtype=torch.int32),
        context_lens=torch.full((rows,), CONTEXT, dtype=torch.int32),
        block_tables=torch.arange(rows, dtype=torch.int32)[:, None].contiguous(),
        logit_rows=torch.arange(rows),
        num_decodes=rows,
    )


@torch.inference_mode()
def best_step_s(model: CausalLM, ops: NativeOps, rows: int) -> float:
    config, batch = model.config, decodes(rows)
    kv = ops.allocate_kv(KVShape(config.num_layers, rows, BLOCK, config.num_kv_heads, config.head_dim))
    best = float("inf")
    for _ in range(ROUNDS):
        before = time.process_time()
        model(batch, kv)
        best = min(best, time.process_time() - before)
    return best


def main() -> None:
    torch.set_num_threads(1)
    ops = NativeOps("bfloat16", threads=1)
    dense, mixture = random_model(DENSE, ops), random_model(MIXTURE, ops)
    print("| tokens in a step | dense | mixture, 8 of 64 experts | |\n|---|---|---|---|")
    for rows in ROWS:
        one, other = (1000 * best_step_s(model, ops, rows) for model in (dense, mixture))
        print(f"| {rows} | {one:.1f} ms | {other:.1f} ms | {other / one:.2f}x |", flush=True)


if __name__ == "__main__":
    main()
