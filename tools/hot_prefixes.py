"""Traces with few and hot shared prefixes, in Mooncake's format, for `penstock sim compare`.

    python -m tools.hot_prefixes DIRECTORY [--count 4000]

Writes hot (8 prefixes of 8 to 16 thousand tokens, by Zipf), long (60 of 16 to 32 thousand, conversations), one (a
single prefix), mid (300, long conversations) and none.
"""

from __future__ import annotations

import argparse
import json
from itertools import count
from pathlib import Path
from random import Random
from typing import NamedTuple

BLOCK = 512
THINK_S = 20.0


class Shape(NamedTuple):
    prefixes: int
    blocks: tuple[int, int]  # of a prefix
    zipf: float
    suffix: int  # tokens of a turn, in the median
    output: int
    turns: int  # of a conversation, in the mean
    share: int = 1  # of `--count`


SHAPES = {
    "hot": Shape(8, (16, 32), 1.2, 500, 200, 1),
    "long": Shape(60, (32, 64), 0.8, 800, 250, 3),
    "one": Shape(1, (16, 16), 0.0, 400, 150, 1),
    "none": Shape(0, (0, 0), 0.0, 2000, 250, 1),
    "mid": Shape(300, (8, 32), 0.9, 1500, 350, 4, share=2),
}


def rows(shape: Shape, number: int, rng: Random) -> list[tuple[float, int, int, list[int]]]:
    """Arrival, prompt tokens, output tokens and names of blocks. Conversations begin at random, one a second."""
    names, found, now = count(), [], 0.0
    prefixes = [[next(names) for _ in range(rng.randint(*shape.blocks))] for _ in range(shape.prefixes)]
    weights = [1 / (rank + 1) ** shape.zipf for rank in range(shape.prefixes)]
    for _ in range(max(1, round(number / shape.turns))):
        now += rng.expovariate(1.0)
        blocks = list(rng.choices(prefixes, weights)[0]) if prefixes else []
        tokens, at = BLOCK * len(blocks), now
        for _ in range(max(1, round(rng.expovariate(1 / shape.turns))) if shape.turns > 1 else 1):
            tokens += max(8, round(rng.lognormvariate(0, 0.8) * shape.suffix))
            blocks = blocks + [next(names) for _ in range(-(-tokens // BLOCK) - len(blocks))]
            output = max(2, round(rng.lognormvariate(0, 0.8) * shape.output))
            found.append((at, tokens, output, list(blocks)))
            if tokens % BLOCK:  # the next turn changes the last block
                blocks = blocks[:-1]
            tokens += output
            at += rng.expovariate(1 / THINK_S)
    return sorted(found, key=lambda row: row[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--count", type=int, default=4000)
    arguments = parser.parse_args()
    for seed, (name, shape) in enumerate(SHAPES.items(), start=1):
        path = arguments.directory / f"{name}.jsonl"
        with path.open("w") as file:
            for at, tokens, output, blocks in rows(shape, shape.share * arguments.count, Random(seed)):
                row = {
                    "timestamp": round(at * 1000),
                    "input_length": tokens,
                    "output_length": output,
                    "hash_ids": blocks,
                }
                file.write(json.dumps(row) + "\n")
        print(path)


if __name__ == "__main__":
    main()
