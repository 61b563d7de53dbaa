"""Wire formats: what clients send, what they get back, and how errors become HTTP. No engine, no tokenizer."""
