"""Times every kernel of `penstock.model.ops.triton` on a GPU against what the hardware can do. Correctness is pytest's:
tests/model/ops/triton.

    python -m tools.gpu_ops [small] [linears] [decode] [shared] [prefill] [adapters]
    python -m tools.gpu_ops [experts] [routers] [sweep-experts]
    python -m tools.gpu_ops [blocks] [sweep-q6k]
    python -m tools.gpu_ops [products] [sweep-gemv] [sweep-decode] [sweep-plan] [sweep-prefill]

Tilings and plans are fixed in the sources, so that start-up tunes nothing; the sweeps are where they come from.
`products` times cuBLAS alone: which of its FP8 products are worth calling.
"""
