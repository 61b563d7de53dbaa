"""Models that are no LLMs: tensors in, tensors out, batched across requests. ONNX Runtime computes them; torch is not
needed. A replica of such a model is one process: its HTTP server, its batchers and the threads of its instances."""
