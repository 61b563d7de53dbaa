"""One step of a model on this CPU, part by part: with the weights as the file has them, and widened.

    python tools/cpu_step.py [smollm2] [--threads 2] [--steps 1x192,8x192,32x192,0+128] [--seconds 4]
    python tools/cpu_step.py --threads 1 --against DIR      # today's kernels beside those in another directory

A step is sequences x context, all decoding, or context + tokens of one prompt; 8x1072/1024: of the context the first
1,024 are in the same blocks. The two take turns, and the best of each counts, or against another directory the medians
and the median of the ratios. On one thread its own CPU time is shown, which company on the machine cannot spoil much.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from penstock.hub.resolve import resolve
from penstock.model.batch import Batch
from penstock.model.layers import Decoder, DecoderLayer
from penstock.model.loading import load_model
from penstock.model.ops import KVShape, LayerKV, Stream, build
from penstock.model.ops.formats import choose_format
from penstock.model.ops.native import NativeOps

BLOCK = 16
NUM_BLOCKS = 2048


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
        ops.settle_kv(self.kv).join()  # as when it is served
        for layer in self.kv:  # blocks that were never written are all one page of zeros
            layer.keys.fill_(0x3D)  # 0.05 in any format; a denormal number would be slow
            layer.values.fill_(0x3D)

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
    step, _, shared = step.partition("/")
    prefills = "+" in step
    first, second = map(int, step.replace("+", "x").split("x"))
    sequences, context, tokens = (1, first, second) if prefills else (first, second, 1)
    blocks = math.ceil((context + tokens) / BLOCK)
    tables = torch.randperm(NUM_BLOCKS, dtype=torch.int32)[: sequences * blocks].view(sequences, blocks)
    tables[:, : int(shared or 0) // BLOCK] = tables[0, : int(shared or 0) // BLOCK]
    return Batch(
        token_ids=torch.randint(0, 1000, (sequences * tokens,), dtype=torch.int32),
        positions=torch.arange(context, context + tokens, dtype=torch.int32).repeat(sequences),
        query_starts=torch.arange(0, sequences * tokens + 1, tokens, dtype=torch.int32),
        context_lens=torch.full((sequences,), context + tokens, dtype=torch.int32),
        block_tables=tables,
        logit_rows=torch.arange(tokens - 1, sequences * tokens, tokens),
        num_decodes=0 if prefills else sequences,
    )


def taken_ms(parts: list[Callable[[], object]], seconds: float, clock: Callable[[], float]) -> list[list[float]]:
    """Returns the milliseconds that each part took, turn by turn."""
    taken: list[list[float]] = [[] for _ in parts]
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        for times, part in zip(taken, parts, strict=True):
            before = clock()
            part()
            times.append(1000 * (clock() - before))
    return taken


def compare(models: list[Model], steps: list[str], seconds: float, clock: Callable[[], float]) -> None:
    for step in steps:
        batch = batch_of(step)
        now, then = (model.parts(batch) for model in models)
        for name in now:
            new, old = taken_ms([now[name], then[name]], seconds / len(now), clock)
            ratio = statistics.median(b / a for a, b in zip(new, old, strict=True))
            medians = f"{statistics.median(old):8.2f} -> {statistics.median(new):8.2f}"
            print(f"{step:>12}  {name:10} ms: {medians}   {ratio:.2f} times as fast", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", default="1x192,8x192,32x192,0+128,0+512")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each step")
    parser.add_argument("--against", type=Path, metavar="DIR", help="other kernels, such as those of an older checkout")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    if arguments.against:
        models = [Model(arguments.model, arguments.threads, keeps=True)]
        build.SOURCES = arguments.against
        models.append(Model(arguments.model, arguments.threads, keeps=True))
        compare(models, arguments.steps.split(","), arguments.seconds, clock)
        return
    models = [Model(arguments.model, arguments.threads, keeps=keeps) for keeps in (True, False)]
    for step in arguments.steps.split(","):
        batch = batch_of(step)
        named = [model.parts(batch) for model in models]
        taken = taken_ms([part for parts in named for part in parts.values()], arguments.seconds, clock)
        found = iter(map(min, taken))
        for model, parts in zip(models, named, strict=True):
            told = "  ".join(f"{name} {next(found):.2f}" for name in parts)
            print(f"{step:>8}  {model.name:32} ms: {told}", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
