"""ONNX models: tensors in, tensors out, batched across requests, computed by ONNX Runtime. Torch is not needed.

A replica of such a model is one process: its HTTP server, its batchers and the threads of its instances."""
