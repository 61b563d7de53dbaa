"""Tokens a second of a checkpoint on the engine in process, for the report of `penstock quantize`."""

from __future__ import annotations

import gc
from itertools import product

from penstock.bench.engine import run_round
from penstock.bench.roofline import EngineWorkload
from penstock.cli.bench_engine import make_scheduler
from penstock.core.settings import EngineSettings
from penstock.hub.checkpoint import Checkpoint
from penstock.quant.job import Progress
from penstock.runner.assemble import assemble

PROMPT, OUTPUT = 32, 96  # tokens of a request whose speed is measured
REQUESTS = (1, 8)  # at once
ROUNDS = 2


def speeds_of(checkpoint: Checkpoint, progress: Progress) -> dict[int, float]:
    """A short measure on the engine in process, as it would be served: the best of the rounds."""
    length = min(checkpoint.config.context_length, PROMPT + OUTPUT)
    settings = EngineSettings(max_model_len=length, max_num_seqs=max(REQUESTS), memory_fraction=0.1)
    assembly = assemble(checkpoint, settings, lambda *_: None)
    found: dict[int, float] = {}
    for number, (count, seed) in enumerate(product(REQUESTS, range(ROUNDS))):
        progress(number, len(REQUESTS) * ROUNDS)
        work = EngineWorkload("quantize", [(PROMPT, length - PROMPT)] * count)
        run = run_round(
            work,
            seed,
            vocab_size=checkpoint.config.vocab_size,
            scheduler=make_scheduler(assembly),
            runner=assembly.runner,
            busy_s=None,
        )
        found[count] = max(found.get(count, 0.0), work.output_tokens / run.seconds)
    progress(len(REQUESTS) * ROUNDS, len(REQUESTS) * ROUNDS)
    del assembly
    gc.collect()  # the next one needs the memory
    return found
