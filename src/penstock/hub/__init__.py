"""Model files by name: aliases, the cache on disk, pulling, and reading GGUF and Hugging Face formats.

No torch: tensors leave here as numpy arrays, so the edge can read a tokenizer and a config without an engine.
"""
