"""Products with weights: GEMV for a few rows in each number format, GEMM for many where cuBLAS has none."""
