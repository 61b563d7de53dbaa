"""The effect of the KV cache's number format on speed and quality on this CPU, formats side by side.

    python -m tools.cpu_kv [--model smollm2] [--sequences 32] [--contexts 128,1000,4000] [--steps 12] [--threads 2]

First the attention of one layer of SmolLM2's shape, then whole steps of the model in process: its prompts are computed,
then every sequence decodes one token a step. Formats take turns, and the best of each counts: whoever else uses the
machine spoils the others. Last the model's perplexity (`tools/perplexity.py`). `--model none`: attention alone.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from tools.perplexity import prose, table

from penstock.core.model_config import ModelConfig
from penstock.core.sampling import SamplingParams
from penstock.core.settings import EngineSettings
from penstock.hub.resolve import resolve
from penstock.model.batch import Batch
from penstock.model.ops import AttentionSpec, KVShape
from penstock.model.ops.native import NativeOps
from penstock.model.rope import rope_tables
from penstock.runner.assemble import Assembly, assemble
from penstock.sched.plan import SampleSpec, Slice, StepPlan
from penstock.text.tokenizer import Tokenizer

FORMATS: dict[str, tuple[str, torch.dtype | None]] = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16_dot", None),
    "int8": ("bfloat16_dot", torch.int8),
}
HEADS, KV_HEADS, DIM, BLOCK = 9, 3, 64, 16
LAYERS = 4  # met in turn: together they are larger than any cache
GREEDY = SamplingParams(temperature=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--contexts", default="128,1000,4000", help="of the attention alone; steps are at 1,000")
    parser.add_argument("--steps", type=int, default=12, help="of every format")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    for context in map(int, arguments.contexts.split(",")):
        show_attention(arguments.sequences, context, arguments.steps, arguments.threads)
    if arguments.model != "none":
        show_steps(arguments.model, arguments.sequences, 1000, arguments.steps, arguments.threads)
        show_perplexity(arguments.model)


def take_turns(turns: dict[str, Callable[[], object]], best: dict[str, float]) -> None:
    for name, turn in turns.items():
        before = time.perf_counter()
        turn()
        best[name] = min(best[name], time.perf_counter() - before)


def show_perplexity(model: str) -> None:
    checkpoint = resolve(model)
    token_ids = prose(Tokenizer.load(checkpoint.tokenizer_source))
    table(checkpoint, ["float32", "float32+int8-kv"], token_ids, "cpu", windows=16, length=512)


# -- attention alone ---------------------------------------------------------------------------------------------------


def decode_batch(sequences: int, context: int) -> Batch:
    """A token of each; blocks lie anywhere."""
    width = -(-context // BLOCK)
    tables = torch.randperm(sequences * width).view(sequences, width)

    def ints(values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.int32).contiguous()

    return Batch(
        token_ids=ints(torch.zeros(sequences)),
        positions=ints(torch.full((sequences,), context - 1)),
        query_starts=ints(torch.arange(sequences + 1)),
        context_lens=ints(torch.full((sequences,), context)),
        block_tables=ints(tables),
        logit_rows=torch.arange(sequences),
        num_decodes=sequences,
    )


def attention_turns(
    arithmetic: str, kv_dtype: torch.dtype | None, batch: Batch, threads: int
) -> list[Callable[[], object]]:
    """One for each layer."""
    ops = NativeOps(arithmetic, threads, kv_dtype=kv_dtype)
    spec = AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5, None)
    rope = rope_tables(ModelConfig("llama", 1, 1, 1, 1, HEADS, KV_HEADS, DIM, 8192), torch.device("cpu"))
    layers = ops.allocate_kv(KVShape(LAYERS, batch.block_tables.numel(), BLOCK, KV_HEADS, DIM))
    for layer in layers:
        layer.keys.fill_(0x3C), layer.values.fill_(0x3C)  # small numbers in every format; pages that are there
    qkv = torch.randn(batch.num_tokens, (HEADS + 2 * KV_HEADS) * DIM)
    ops.begin(batch)
    return [partial(ops.attention, qkv, spec, rope, layer, batch) for layer in layers]


def show_attention(sequences: int, context: int, steps: int, threads: int) -> None:
    batch = decode_batch(sequences, context)
    layers = {name: attention_turns(*how, batch, threads) for name, how in FORMATS.items()}
    best = dict.fromkeys(FORMATS, math.inf)
    for i in range(steps * LAYERS):
        take_turns({name: turns[i % LAYERS] for name, turns in layers.items()}, best)
    print(f"attention of a layer, {sequences} sequences of {context:,} tokens:")
    for name, seconds in best.items():
        print(f"  {name:10} {1000 * seconds:7.3f} ms, {best['bfloat16'] / seconds:.2f} x bfloat16", flush=True)


# -- steps of a model --------------------------------------------------------------------------------------------------


def show_steps(model: str, sequences: int, context: int, steps: int, threads: int) -> None:
    checkpoint = resolve(model)
    found: dict[str, Assembly] = {}
    for name in FORMATS:
        settings = EngineSettings(
            device="cpu",
            threads=threads,
            memory_fraction=0.25,
            max_model_len=context + steps + 1,
            dtype="float32" if name == "float32" else "bfloat16",
            kv_dtype="int8" if name == "int8" else "auto",
        )
        found[name] = assemble(checkpoint, settings, lambda *_: None)
    prompts = torch.randint(checkpoint.config.vocab_size, (sequences, context + steps + 1)).tolist()
    prompt_s, step_s = dict.fromkeys(found, math.inf), dict.fromkeys(found, math.inf)
    for row, ids in enumerate(prompts):
        take_turns({name: partial(prefill, assembly, row, ids, context) for name, assembly in found.items()}, prompt_s)
    for at in range(context, context + steps):
        take_turns({name: partial(decode, assembly, prompts, at) for name, assembly in found.items()}, step_s)
    print(f"steps of {model}, {sequences} sequences of {context:,} tokens:")
    for name, made in found.items():
        seconds, kib = step_s[name], made.size.kv_bytes / made.size.num_blocks / made.limits.block_size / 1024
        print(
            f"  {name:10} {1000 * seconds:6.1f} ms a step, {sequences / seconds:5,.0f} tok/s, "
            f"{step_s['bfloat16'] / seconds:.2f} x bfloat16; a prompt {1000 * prompt_s[name]:,.0f} ms, "
            f"{prompt_s['bfloat16'] / prompt_s[name]:.2f} x; {kib:.1f} KiB of cache a token"
        )


def slice_of(assembly: Assembly, row: int, ids: Sequence[int], start: int, count: int) -> Slice:
    end, width = start + count, -(-len(ids) // assembly.limits.block_size)
    spec = SampleSpec(GREEDY, history=ids[:end], prompt_len=end, position=end)
    return Slice(f"r{row}", start, count, ids[start:end], range(row * width, (row + 1) * width), spec, epoch=0)


def prefill(assembly: Assembly, row: int, ids: Sequence[int], context: int) -> None:
    for start in range(0, context, assembly.limits.chunk_tokens):
        count = min(assembly.limits.chunk_tokens, context - start)
        assembly.runner.submit(StepPlan([slice_of(assembly, row, ids, start, count)])).result()


def decode(assembly: Assembly, prompts: Sequence[Sequence[int]], at: int) -> None:
    assembly.runner.submit(StepPlan([slice_of(assembly, row, ids, at, 1) for row, ids in enumerate(prompts)])).result()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
