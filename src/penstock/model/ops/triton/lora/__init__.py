"""LoRA adapters of a step's rows: their slots in device memory, and the shrink and expand kernels."""
