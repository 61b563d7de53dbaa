"""Prefill and decode apart on one GPU: what a transfer takes, and what long prompts do to answers that are under way.

    python -m tools.kv_transfer_gpu                         # both; the shape of an 8B
    python -m tools.kv_transfer_gpu --only transfer --shape llama1b

Two engines with the same random weights share the card through MPS. **Transfer**: prompts that one has computed are
pulled by the other. **Interference**: streams decode on one engine while long prompts arrive at a steady rate, computed
by the same engine (together, for each size of its chunks) or by the other one (split). The card's compute is shared
either way, so this says what splitting costs and what it does to the gaps between tokens, and not what a second card
would bring.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from time import perf_counter

from tools.kv_transfer_gpu.engines import Answer, EngineProcess

from penstock.bench.shapes import shape
from penstock.core.model_config import ModelConfig
from penstock.core.settings import EngineSettings
from penstock.link.mps import start_mps

_WARM_PROMPT = 512


@dataclass
class Dice:
    vocab_size: int
    source: random.Random

    def prompt(self, length: int) -> list[int]:
        return self.source.choices(range(self.vocab_size), k=length)


def transfers(
    lender: EngineProcess, puller: EngineProcess, address: str, dice: Dice, arguments: argparse.Namespace
) -> None:
    print(
        "\n| prompt | computed, ms | pulled: tokens | ms | first token after, ms |\n|---|---|---|---|---|", flush=True
    )
    for number in range(arguments.rounds + 1):
        prompt = dice.prompt(arguments.prompt)
        computed = lender.submit(f"compute {number}", prompt, 1)
        computed.wait()
        pulled = puller.submit(f"pull {number}", prompt, 1, address)
        pulled.wait()
        assert pulled.timings is not None
        if number:  # the first one makes the connection
            cells = [arguments.prompt, f"{1e3 * computed.ttft_s:.1f}", pulled.timings.pulled_tokens]
            cells += [f"{1e3 * pulled.timings.pull_s:.2f}", f"{1e3 * pulled.ttft_s:.1f}"]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def interference(
    name: str, engine: EngineProcess, source: str | None, rate: float, dice: Dice, arguments: argparse.Namespace
) -> None:
    """One row: gaps between tokens of running streams while prompts arrive."""
    label = f"{name} {rate}"
    enough = 8192 - _WARM_PROMPT - 8
    streams = [
        engine.submit(f"{label} stream {number}", dice.prompt(_WARM_PROMPT), enough)
        for number in range(arguments.streams)
    ]
    while any(len(stream.tokens) < 5 for stream in streams):
        time.sleep(0.01)
    began_s = perf_counter()
    prompts: list[Answer] = []
    while (now_s := perf_counter()) < began_s + arguments.seconds:
        if len(prompts) < rate * (now_s - began_s):
            one = engine.submit(
                f"{label} prompt {len(prompts)}", dice.prompt(arguments.prompt), 1, source, prefills=source is not None
            )
            prompts.append(one)
        time.sleep(0.001)
    ended_s = perf_counter()
    gaps = [gap for stream in streams for gap in gaps_within(stream.times_s, began_s, ended_s)]
    num_tokens = sum(began_s <= each < ended_s for stream in streams for each in stream.times_s)
    done = [one for one in prompts if one.tokens]
    ttft = [one.ttft_s for one in done]
    gaps.sort()
    cells = [name, f"{rate:g}", f"{1e3 * statistics.median(gaps):.1f}", f"{1e3 * quantile(gaps, 0.95):.1f}"]
    cells += [f"{1e3 * quantile(gaps, 0.99):.1f}", f"{1e3 * gaps[-1]:.0f}"]
    cells += [f"{num_tokens / (ended_s - began_s):,.0f}", f"{len(done)} of {len(prompts)}"]
    cells += [f"{statistics.median(ttft):.2f}" if ttft else "-"]
    print("| " + " | ".join(cells) + " |", flush=True)
    for each in [*streams, *prompts]:
        engine.abort(each)


def gaps_within(times_s: Sequence[float], began_s: float, ended_s: float) -> list[float]:
    return [after - before for before, after in pairwise(times_s) if began_s <= after < ended_s]


def quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def started(config: ModelConfig, settings: EngineSettings, share: str = "100") -> EngineProcess:
    """`share`: percent of the card's processors that it may use. One after the other: each measures how much memory of
    the card is free."""
    os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = share
    engine = EngineProcess(config, settings)
    engine.wait_ready()
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama8b")
    parser.add_argument("--only", choices=["transfer", "interference"])
    parser.add_argument("--prompt", type=int, default=8000, help="tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=32, help="that decode")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each rate")
    parser.add_argument("--rates", default="1,2,3", help="prompts per second")
    parser.add_argument("--chunks", default="512,2048,8192", help="sizes of chunks of the engine that computes prompts")
    parser.add_argument("--share", default="100,40", help="percent of the card that the prefill engine may use (MPS)")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if arguments.device == "cuda":
            start_mps(Path(directory))
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    config = shape(arguments.shape)
    dice = Dice(config.vocab_size, random.Random(1))
    plain = EngineSettings(
        device=arguments.device,
        kv_port=0,
        max_num_seqs=arguments.streams + 16,
        memory_fraction=0.35,
        chunk_tokens=8192,
    )
    rates = [float(rate) for rate in arguments.rates.split(",")]
    head = "\n| | prompts/s | gap p50, ms | p95 | p99 | longest | streams, tokens/s | prompts done | TTFT p50, s |"
    chunks = [int(chunk) for chunk in arguments.chunks.split(",")]
    puller = started(config, plain)
    if arguments.only != "interference":
        lender = started(config, plain)
        transfers(lender, puller, lender.address, dice, arguments)
        lender.close()
    if arguments.only != "transfer":
        print(head + "\n|" + "---|" * 9, flush=True)
        interference("no prompts", puller, None, 0.0, dice, arguments)
        for share in arguments.share.split(","):
            for chunk in chunks:
                lender = started(config, replace(plain, chunk_tokens=chunk), share)
                for rate in rates:
                    name = f"split, chunks of {chunk}, {share} % of the card"
                    interference(name, puller, lender.address, rate, dice, arguments)
                lender.close()
    puller.close()
    for chunk in chunks if arguments.only != "transfer" else []:
        alone = started(config, replace(plain, chunk_tokens=chunk))
        for rate in rates:
            interference(f"together, chunks of {chunk}", alone, None, rate, dice, arguments)
        alone.close()


if __name__ == "__main__":
    main()
