"""Parts that kernels of several operations use: the device, dependent launch, inline PTX, norms and SwiGLU, argmax."""
