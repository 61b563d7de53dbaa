"""Perplexity of a model on a fixed text, number format by number format: what quantization costs.

    python tools/perplexity.py MODEL [--device cuda] [--formats bfloat16,fp8,fp8-kv] [--windows 16] [--length 512]

The text is Python's own reference manual, as `help()` has it. It is cut into windows that run side by side through the
runner that would serve them, kernels, graphs, paged cache and all. The first half of a window is prefilled chunk by
chunk and scored after every chunk; the second half is decoded and every token is scored. A bias makes the sampler
choose the text's next token; the log probability that comes with it is the model's own.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

from penstock.core.errors import ConfigError
from penstock.core.sampling import SamplingParams
from penstock.core.settings import EngineSettings
from penstock.hub.checkpoint import Checkpoint
from penstock.hub.hf import HFCheckpoint
from penstock.runner.assemble import assemble
from penstock.sched.plan import Runner, SampleSpec, Slice, StepPlan
from penstock.text.tokenizer import Tokenizer

TOPIC = "specialnames"  # 60,000 characters about the names of special methods
CHUNK = 16  # tokens of each window in a step of the first half
FORCE = 1e4  # a bias that no logit withstands

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "quant": "none"},
    "bfloat16": {"dtype": "bfloat16", "quant": "none"},
    "stored": {"dtype": "bfloat16"},
    "fp8": {"dtype": "bfloat16", "quant": "fp8"},
    "int8": {"dtype": "bfloat16", "quant": "int8"},
    "w8a8": {"dtype": "bfloat16", "quant": "w8a8"},
    "int4": {"dtype": "bfloat16", "quant": "int4"},
    "fp8-kv": {"dtype": "bfloat16", "kv_dtype": "fp8"},
    "float32+int8-kv": {"dtype": "float32", "quant": "none", "kv_dtype": "int8"},
    "int8-kv": {"dtype": "bfloat16", "quant": "none", "kv_dtype": "int8"},
    "fp8+fp8-kv": {"dtype": "bfloat16", "quant": "fp8", "kv_dtype": "fp8"},
}


@dataclass(frozen=True)
class Perplexity:
    prefill: float
    decode: float
    num_prefill: int  # tokens scored
    num_decode: int


@dataclass(frozen=True)
class Window:
    name: str
    token_ids: Sequence[int]
    block_ids: Sequence[int]

    def slice(self, start: int, count: int) -> Slice:
        """`count` tokens from `start`, and the one after them as the token to choose."""
        end = start + count
        params = SamplingParams(temperature=0.0, logit_bias={self.token_ids[end]: FORCE}, num_logprobs=0)
        spec = SampleSpec(params, history=self.token_ids[:end], prompt_len=end, position=end)
        return Slice(self.name, start, count, self.token_ids[start:end], self.block_ids, spec, epoch=0)


def open_model(name: str) -> Checkpoint:
    """A directory needs nothing that reads GGUF files: a machine with a GPU may have little installed."""
    if Path(name).is_dir():
        return HFCheckpoint(Path(name))
    from penstock.hub.resolve import resolve

    return resolve(name)


def prose(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(topics[TOPIC], add_special_tokens=False)


def perplexity(
    checkpoint: Checkpoint, settings: EngineSettings, token_ids: Sequence[int], *, windows: int, length: int
) -> Perplexity:
    """Returns the perplexity of the first `windows` runs of `length` tokens."""
    assert length % (2 * CHUNK) == 0
    assert windows * length < len(token_ids), "the text is too short"
    settings = replace(settings, max_num_seqs=windows, chunk_tokens=windows * CHUNK, memory_fraction=0.1)
    assembly = assemble(checkpoint, settings, lambda *_: None)
    blocks = -(-length // assembly.limits.block_size)  # of a window
    assert windows * blocks <= assembly.size.num_blocks
    cut = [
        Window(f"w{i}", token_ids[i * length : (i + 1) * length + 1], range(i * blocks, (i + 1) * blocks))
        for i in range(windows)
    ]
    half = length // 2
    prefill = [s for start in range(0, half, CHUNK) for s in _scores(assembly.runner, cut, start, CHUNK)]
    decode = [s for start in range(half, length) for s in _scores(assembly.runner, cut, start, 1)]
    del assembly
    gc.collect()  # the next format needs the memory
    torch.cuda.empty_cache()
    return Perplexity(_perplexity(prefill), _perplexity(decode), len(prefill), len(decode))


def _scores(runner: Runner, windows: Sequence[Window], start: int, count: int) -> list[float]:
    """One step: the log probability, in each window, of the token that follows those `count`."""
    result = runner.submit(StepPlan([window.slice(start, count) for window in windows])).result()
    scores = []
    for window, sampled in zip(windows, result.sampled, strict=True):
        assert sampled is not None
        assert sampled.logprobs is not None
        assert sampled.token_ids == [window.token_ids[start + count]]
        scores.append(sampled.logprobs[0].logprob)
    return scores


def _perplexity(scores: Sequence[float]) -> float:
    return math.exp(-math.fsum(scores) / len(scores))


def table(
    checkpoint: Checkpoint, formats: Sequence[str], token_ids: Sequence[int], device: str, *, windows: int, length: int
) -> dict[str, Perplexity]:
    """Measures and prints format by format; the first is what the others are compared with."""
    found: dict[str, Perplexity] = {}
    for name in formats:
        settings = EngineSettings(device=device, max_model_len=length, **FORMATS[name])  # type: ignore[arg-type]
        one = found[name] = perplexity(checkpoint, settings, token_ids, windows=windows, length=length)
        base = found[formats[0]]
        print(
            f"{name:15} prefill {one.prefill:8.4f} ({one.prefill / base.prefill - 1:+.2%}, {one.num_prefill} tokens)  "
            f"decode {one.decode:8.4f} ({one.decode / base.decode - 1:+.2%}, {one.num_decode} tokens)",
            flush=True,
        )
    return found


def main() -> None:
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Perplexity of a model in several number formats.")
    parser.add_argument("model", help="an alias, a .gguf file, a Hugging Face directory, or hf:org/name")
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--formats", help=f"of {', '.join(FORMATS)}; the first is the base of the comparison")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--length", type=int, default=512, help="tokens in a window")
    arguments = parser.parse_args()
    default = "bfloat16,fp8,fp8-kv,fp8+fp8-kv" if arguments.device == "cuda" else "float32,bfloat16,stored"
    checkpoint = open_model(arguments.model)
    token_ids = prose(Tokenizer.load(checkpoint.tokenizer_source))
    formats = (arguments.formats or default).split(",")
    try:
        table(checkpoint, formats, token_ids, arguments.device, windows=arguments.windows, length=arguments.length)
    except ConfigError as error:
        sys.exit(error.message)


if __name__ == "__main__":
    main()
