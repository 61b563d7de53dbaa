"""KV transfer: blocks of prompts that an engine pulls from another one instead of computing them."""
