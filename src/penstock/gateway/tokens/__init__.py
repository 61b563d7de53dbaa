"""Prompts as tokens.

request_size        how large a request is: what is reserved, what is expected, whether it fits
prompt_tokens       the number of tokens of a prompt, as well as it is known now; off the event loop if it is long
prompt_tokenizer    tokens and prefix hashes by the model's own tokenizer
memo                results that are likely to be needed again
tokenizer_source    where a model's tokenizer comes from
byte_hashes         prefix hashes where the tokenizer is not known
"""
