"""Savings by KV blocks in host memory: prompts that a small cache has lost come again, without and with `host_kv_gib`.

    python -m tools.host_kv [--prompts 10] [--tokens 600]
    python -m tools.host_kv --disk [--prompts 5] [--tokens 600]            # and from disk, after a restart
    python -m tools.host_kv --shape llama8b --prompts 8 --tokens 7680      # a GPU

The default model on this machine's CPU, with a cache that holds about half of the prompts. Answers must be the same.
With `--shape` the engine alone, on whatever device there is, with random weights: copies and steps beside them too.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.cli.real_server import RealServer

MODEL = "smollm2"
SMALL = ("--memory-fraction", "0.01")
TIER = ("--host-kv-gib", "0.5")


def ask(server: RealServer, prompt: list[int]) -> tuple[float, str]:
    began_s = time.monotonic()
    answer = server.openai.completions.create(model=MODEL, prompt=prompt, max_tokens=4, temperature=0)
    return time.monotonic() - began_s, answer.choices[0].text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=600, help="of each")
    parser.add_argument("--shape", help="of a model without weights, in process; one of `penstock bench engine`'s")
    parser.add_argument("--disk", action="store_true", help="blocks on disk, found by another server")
    parser.add_argument("--host-gib", type=float, default=16.0)
    parser.add_argument("--memory-fraction", type=float)
    given = parser.parse_args()
    if given.shape:
        from tools.host_kv_engine import measure

        measure(given.shape, given.host_gib, given.memory_fraction, given.prompts, given.tokens)
    elif given.disk:
        restart(given.prompts, given.tokens)
    else:
        serve(given.prompts, given.tokens)


def restart(num_prompts: int, num_tokens: int) -> None:
    """Prompts for a server, more prompts until it has none of the first on the device, and the first ones again for
    another server: without and with what the first has left on disk. Nothing of it is in the page cache."""
    from tests.cli.real_server import eventually, real_server

    rng = random.Random(1)
    prompts, fillers = (
        [[rng.randrange(1000, 40_000) for _ in range(num_tokens)] for _ in range(count)]
        for count in (num_prompts, num_prompts + 8)
    )
    with tempfile.TemporaryDirectory() as path:
        flags = (*SMALL, *TIER, "--disk-kv-gib", "4", "--disk-kv-path", path)
        with real_server(*flags, model=MODEL) as server:
            answers = [ask(server, prompt)[1] for prompt in prompts]
            for prompt in fillers:
                ask(server, prompt)
            block_tokens = 16
            wanted = num_prompts * (num_tokens // block_tokens - 1)
            eventually(lambda: len(list(Path(path).glob("*/*.kv"))), lambda count: count >= wanted)
        num_bytes = uncache(Path(path))
        print(f"{num_bytes / 1e6:.0f} MB on disk; seconds to four tokens of a prompt of {num_tokens}")
        for name, given in (("computed", SMALL + TIER), ("from disk", flags)):
            with real_server(*given, model=MODEL) as server:
                ask(server, fillers[0][:64])  # the first request of all pays for what is made late
                found = [ask(server, prompt) for prompt in prompts]
                metrics = server.metrics()
            assert [answer for _, answer in found] == answers, "an answer changed"
            seconds = sorted(each_s for each_s, _ in found)
            loaded, late = (metrics[f"penstock_disk_kv_{name}_total"] for name in ("tokens", "late_blocks"))
            print(
                f"{name:12} median {seconds[len(seconds) // 2]:6.3f}, from {seconds[0]:.3f} to {seconds[-1]:.3f}; "
                f"{loaded:.0f} tokens from disk, {late:.0f} blocks late"
            )


def uncache(path: Path) -> int:
    """Have the files below on disk alone; how many bytes that is."""
    total = 0
    for file in path.glob("*/*.kv"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        total += file.stat().st_size
    return total


def serve(num_prompts: int, num_tokens: int) -> None:
    from tests.cli.real_server import real_server

    rng = random.Random(1)
    prompts = [[rng.randrange(1000, 40_000) for _ in range(num_tokens)] for _ in range(num_prompts)]
    answers = []
    print(f"{'':16} {'first time':>12} {'again':>12} {'from the host':>16}")
    for name, flags in (("device alone", SMALL), ("with host_kv_gib", SMALL + TIER)):
        with real_server(*flags, model=MODEL) as server:
            first, again = ([ask(server, prompt) for prompt in prompts] for _ in range(2))
            loaded = server.metrics()["penstock_host_kv_tokens_total"]
        seconds = [sum(each_s for each_s, _ in turn) / len(prompts) for turn in (first, again)]
        print(f"{name:16} {seconds[0]:10.3f} s {seconds[1]:10.3f} s {loaded:9.0f} tokens", flush=True)
        answers += [[text for _, text in first], [text for _, text in again]]
    sys.exit(any(each != answers[0] for each in answers))


if __name__ == "__main__":
    main()
