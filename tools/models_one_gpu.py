"""Two busy models on one GPU: engines in one process, in two, and in two with MPS. `python -m tools.models_one_gpu`.

Each model has random weights and a batch of requests; both begin at once. Prints tokens per second of both, and
what the card holds beside KV caches: weights, contexts, graphs and kernels. Alone is one model by itself.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter

from penstock.bench.shapes import shape
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.core.settings import EngineSettings
from penstock.engine.messages import FromEngine, StepReport, Stop, Submit, ToEngine
from penstock.link.mps import start_mps

PROMPT, OUTPUT = 128, 256
_SPAWN = multiprocessing.get_context("spawn")


@dataclass
class Batch:
    """A mailbox that hands over all requests of all models, and is done when the last is answered."""

    messages: list[ToEngine]
    num_tokens: int = 0
    reports: list[StepReport] = field(default_factory=list)

    def receive(self, *, wait: bool) -> list[ToEngine]:
        if self.messages:
            handed, self.messages = self.messages, []
            return handed
        return [Stop()] if wait else []

    def send(self, message: FromEngine) -> None:
        assert isinstance(message, StepReport)
        self.num_tokens += sum(len(event.token_ids) for event in message.events)


def requests(vocab_size: int, count: int, seed: str) -> list[Request]:
    source = random.Random(seed)
    sampling = SamplingParams(temperature=0.0)
    return [
        Request(
            id=f"{seed} {i}",
            prompt_ids=source.choices(range(vocab_size), k=PROMPT),
            max_tokens=OUTPUT,
            sampling=sampling,
        )
        for i in range(count)
    ]


def process(name: str, num_engines: int, sequences: Sequence[int], rounds: int, pipe: Connection) -> None:
    """A process with this many engines. It says what it holds, and then, for each word it gets, how many tokens a batch
    of each engine had."""
    from penstock.cli.bench_engine import make_scheduler
    from penstock.core.clock import MonotonicClock
    from penstock.engine.engine import Engine
    from penstock.engine.loop import EngineLoop
    from penstock.model.random_weights import RandomCheckpoint
    from penstock.runner.ranks.assemble import assemble_ranks

    config = shape(name)
    settings = EngineSettings(max_num_seqs=64, memory_fraction=0.25, load="dummy")
    made = {
        f"m{i}": assemble_ranks(RandomCheckpoint(config), config, settings, lambda *_: None, max_blocks=4096)
        for i in range(num_engines)
    }
    kept = sum(each.size.kv_bytes for each in made.values())
    pipe.send(kept)
    for count in sequences:
        for number in range(rounds + 1):
            pipe.recv()
            mailbox = Batch(
                [
                    Submit(request, model=model)
                    for model in made
                    for request in requests(config.vocab_size, count, f"{model} {number} {count}")
                ]
            )
            engines = {model: Engine(make_scheduler(each), each.runner, model=model) for model, each in made.items()}
            EngineLoop(engines, mailbox, MonotonicClock()).run()
            pipe.send(mailbox.num_tokens)


def measure(label: str, name: str, engines: Sequence[int], sequences: Sequence[int], rounds: int) -> None:
    """One row. `engines`: of each process."""
    before = used_mib()
    pipes, running = [], []
    for count in engines:
        ours, theirs = _SPAWN.Pipe()
        one = _SPAWN.Process(target=process, args=(name, count, sequences, rounds, theirs), daemon=True)
        one.start()
        theirs.close()
        kept = ours.recv()  # one after the other: each measures how much of the card is free
        pipes.append((ours, kept))
        running.append(one)
    held = used_mib() - before - sum(kept for _, kept in pipes) / 2**20
    cells = [label, f"{held / 1024:.2f}"]
    for _ in sequences:
        rates = []
        for number in range(rounds + 1):
            began_s = perf_counter()
            for pipe, _ in pipes:
                pipe.send(None)
            tokens = sum(pipe.recv() for pipe, _ in pipes)
            if number:  # the first one warms up
                rates.append(tokens / (perf_counter() - began_s))
        cells.append(f"{median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})")
    print("| " + " | ".join(cells) + " |", flush=True)
    for one in running:
        one.kill()
        one.join()


def used_mib() -> float:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return float(subprocess.check_output(command, text=True).split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama1b")
    parser.add_argument("--sequences", default="1,8,32", help="of each model")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    sequences = [int(count) for count in arguments.sequences.split(",")]
    rows = {"alone": [1], "one process": [2], "two processes": [1, 1]}
    print(f"{arguments.shape}, prompts of {PROMPT}, answers of {OUTPUT} tokens; tokens/s of all models together\n")
    print("| | GiB beside KV | " + " | ".join(f"{count} sequences a model" for count in sequences) + " |")
    print("|---" * (2 + len(sequences)) + "|", flush=True)
    for label, engines in rows.items():
        measure(label, arguments.shape, engines, sequences, arguments.rounds)
    with tempfile.TemporaryDirectory() as directory:
        start_mps(Path(directory))
        measure("two processes, MPS", arguments.shape, [1, 1], sequences, arguments.rounds)


if __name__ == "__main__":
    main()
