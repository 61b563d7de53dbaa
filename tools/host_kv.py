"""What KV blocks in host memory save: prompts that a small cache has lost come again, without and with `host_kv_gib`.

    python -m tools.host_kv [--prompts 10] [--tokens 600]

The default model on this machine's CPU, with a cache that holds about half of the prompts. Answers must be the same.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from tests.cli.real_server import MODEL, RealServer, real_server

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
    given = parser.parse_args()
    rng = random.Random(1)
    prompts = [[rng.randrange(1000, 40_000) for _ in range(given.tokens)] for _ in range(given.prompts)]
    answers = []
    print(f"{'':16} {'first time':>12} {'again':>12} {'from the host':>16}")
    for name, flags in (("device alone", SMALL), ("with host_kv_gib", SMALL + TIER)):
        with real_server(*flags) as server:
            first, again = ([ask(server, prompt) for prompt in prompts] for _ in range(2))
            loaded = server.metrics()["penstock_host_kv_tokens_total"]
        seconds = [sum(each_s for each_s, _ in turn) / len(prompts) for turn in (first, again)]
        print(f"{name:16} {seconds[0]:10.3f} s {seconds[1]:10.3f} s {loaded:9.0f} tokens", flush=True)
        answers += [[text for _, text in first], [text for _, text in again]]
    sys.exit(any(each != answers[0] for each in answers))


if __name__ == "__main__":
    main()
