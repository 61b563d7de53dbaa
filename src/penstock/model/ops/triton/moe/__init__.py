"""A mixture of experts: routing, grouped GEMM over all experts of a layer, and the sum of a token's experts."""
