"""One step of a model on this CPU, part by part: with the weights as the file has them, and widened.

    python tools/cpu_step.py [smollm2] [--threads 2] [--steps 1x192,8x192,32x192,0+128] [--seconds 4]

A step is sequences x context, all decoding, or context + tokens of one prompt. The two take turns, and the best of each
counts. On one thread its own CPU time is shown, which company on the machine cannot spoil much.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import torch

from penstock.hub.resolve import resolve
from penstock.model.batch import Batch
from penstock.model.layers import Decoder, DecoderLayer
from penstock.model.loading import load_model
from penstock.model.ops import KVShape, LayerKV, Stream
from penstock.model.ops.formats import choose_format
from penstock.model.ops.native import NativeOps

BLOCK = 16
NUM_BLOCKS = 1024


class Model:
    def __init__(self, name: str, threads: int, *, keeps: bool) -> None:
        checkpoint = resolve(name)
        chosen = choose_format(threads=threads, keep_low_bit=keeps)
        self.name = f"{chosen.arithmetic}, {' and '.join(map(str, chosen.keeps)) or 'no'} bits kept"
        ops = chosen.ops(threads)
        assert isinstance(ops, NativeOps), "there are no native kernels here"
        model = load_model(checkpoint, ops)
        assert isinstance(model, Decoder)
        self.ops, self.model, config = ops, model, checkpoint.config
        self.kv: list[LayerKV] = ops.allocate_kv(
            KVShape(config.num_layers, NUM_BLOCKS, BLOCK, config.num_kv_heads, config.head_dim)
        )
        for layer in self.kv:  # blocks that were never written are all one page of zeros
            layer.keys.fill_(1)
            layer.values.fill_(1)

    def parts(self, batch: Batch) -> dict[str, Callable[[], object]]:
        ops, model, kv = self.ops, self.model, self.kv
        layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
        m, config = batch.num_tokens, model.config
        hidden = torch.randn(m, config.hidden_size)
        attended = torch.randn(m, config.num_heads * config.head_dim)
        qkv = torch.randn(m, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
        between = torch.randn(m, config.intermediate_size)
        last = torch.randn(len(batch.logit_rows), config.hidden_size)

        def linears() -> None:
            for layer in layers:
                layer.attention.qkv(hidden)
                layer.attention.output(attended)
                layer.mlp.gate_up(hidden)
                layer.mlp.down(between)

        def attention() -> None:
            ops.begin(batch)
            for layer, layer_kv in zip(layers, kv, strict=True):
                ops.attention(qkv, layer.attention.spec, layer.attention.rope, layer_kv, batch)

        def all_layers() -> None:
            ops.begin(batch)
            ops.run_layers(model.layers, Stream(hidden.clone()), kv, batch)

        return {
            "step": lambda: model(batch, kv),
            "layers": all_layers,
            "linears": linears,
            "attention": attention,
            "head": lambda: model.head(last),
        }


def batch_of(step: str) -> Batch:
    prefills = "+" in step
    first, second = map(int, step.replace("+", "x").split("x"))
    sequences, context, tokens = (1, first, second) if prefills else (first, second, 1)
    blocks = math.ceil((context + tokens) / BLOCK)
    return Batch(
        token_ids=torch.randint(0, 1000, (sequences * tokens,), dtype=torch.int32),
        positions=torch.arange(context, context + tokens, dtype=torch.int32).repeat(sequences),
        query_starts=torch.arange(0, sequences * tokens + 1, tokens, dtype=torch.int32),
        context_lens=torch.full((sequences,), context + tokens, dtype=torch.int32),
        block_tables=torch.randperm(NUM_BLOCKS, dtype=torch.int32)[: sequences * blocks].view(sequences, blocks),
        logit_rows=torch.arange(tokens - 1, sequences * tokens, tokens),
        num_decodes=0 if prefills else sequences,
    )


def best_ms(parts: list[Callable[[], object]], seconds: float, clock: Callable[[], float]) -> list[float]:
    best, started = [math.inf] * len(parts), time.perf_counter()
    while time.perf_counter() - started < seconds:
        for i, part in enumerate(parts):
            before = clock()
            part()
            best[i] = min(best[i], 1000 * (clock() - before))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", default="1x192,8x192,32x192,0+128,0+512")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each step")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    models = [Model(arguments.model, arguments.threads, keeps=keeps) for keeps in (True, False)]
    for step in arguments.steps.split(","):
        batch = batch_of(step)
        named = [model.parts(batch) for model in models]
        found = iter(best_ms([part for parts in named for part in parts.values()], arguments.seconds, clock))
        for model, parts in zip(models, named, strict=True):
            told = "  ".join(f"{name} {next(found):.2f}" for name in parts)
            print(f"{step:>8}  {model.name:32} ms: {told}", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
