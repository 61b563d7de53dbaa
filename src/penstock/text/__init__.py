"""Text to tokens and back. Knows tokenizers, templates and bytes; no torch, no HTTP, no requests."""
