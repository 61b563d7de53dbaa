"""What KV blocks in host memory save: prompts that a small cache has lost come again, without and with `host_kv_gib`.

    python -m tools.host_kv [--prompts 10] [--tokens 600]
    python -m tools.host_kv --shape llama8b --prompts 8 --tokens 7680      # a GPU

The default model on this machine's CPU, with a cache that holds about half of the prompts. Answers must be the same.
With `--shape` the engine alone, on whatever device there is, with random weights: copies and steps beside them too.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
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
    parser.add_argument("--host-gib", type=float, default=16.0)
    parser.add_argument("--memory-fraction", type=float)
    given = parser.parse_args()
    if given.shape:
        from tools.host_kv_engine import measure

        measure(given.shape, given.host_gib, given.memory_fraction, given.prompts, given.tokens)
    else:
        serve(given.prompts, given.tokens)


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
