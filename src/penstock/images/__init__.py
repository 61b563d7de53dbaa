"""Images of requests, from what a client sent to what a model's encoder takes. No HTTP, no model, no tokenizer.

A replica makes pixels ready with it; a gateway counts tokens by headers alone.

source      bytes of an image: what a data: URL holds, and which URLs may be fetched at all
decode      the header of an image, and its pixels: nothing is decoded before its size is known
processors  pixels to an encoder's numbers, one file for each family, with the results of transformers
reading     an image that was looked at: its size in tokens and its digest, without a pixel
prompt      where the tokens of images stand in a prompt
"""
