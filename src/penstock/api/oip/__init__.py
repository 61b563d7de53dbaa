"""The Open Inference Protocol (KServe, Triton) for models that make text: tensors in, text out."""
