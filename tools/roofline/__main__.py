"""Fit the four constants: `python -m tools.roofline [vllm|penstock]` prints them and the table of all cells.

Makes the worst cell as good as it can be, and the mean one: the largest plus the root mean square of log(predicted :
measured) is least.
"""

from __future__ import annotations

import argparse
import math
import random

from tools.roofline import ranks
from tools.roofline.cells import MEASURED, markdown, predict

from penstock.capacity.hardware import hardware
from penstock.capacity.step_cost import ENGINES, Constants

GPU = hardware()["h200"]
assert GPU.measured is not None
MAX_BANDWIDTH = GPU.measured.bytes_per_s / GPU.bytes_per_s  # more than the best program reads would be no physics
START = (0.8, 0.6, 50e-6, 5e-6)


def fit(engine: str, seed: int = 0) -> Constants:
    """A random walk that takes what is better, in steps that shrink: four numbers need nothing cleverer."""
    source, step = random.Random(seed), 0.3
    values: tuple[float, ...] = START
    best = _badness(engine, values)
    while step > 1e-3:
        tries = [[value * math.exp(source.gauss(0, step)) for value in values] for _ in range(20)]
        found, badness = min(((each, _badness(engine, each)) for each in tries), key=lambda pair: pair[1])
        if badness < best:
            values, best = tuple(found), badness
        else:
            step *= 0.8
    return Constants(*values)


def _badness(engine: str, values: list[float] | tuple[float, ...]) -> float:
    if values[0] > MAX_BANDWIDTH:
        return math.inf
    errors = [abs(math.log(cell.ratio)) for cell in predict(engine, Constants(*values))]
    return max(errors) + math.sqrt(sum(error * error for error in errors) / len(errors))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.roofline", description=__doc__)
    parser.add_argument("engine", nargs="?", choices=sorted(MEASURED), default="vllm")
    parser.add_argument(
        "--shipped", action="store_true", help="the table of the constants in step_cost.py, without a fit"
    )
    parser.add_argument("--ranks", action="store_true", help="the table of ranks on one GPU, and end")
    arguments = parser.parse_args()
    if arguments.ranks:
        print(ranks.markdown(ranks.checked()))
        return
    constants = ENGINES[arguments.engine] if arguments.shipped else fit(arguments.engine)
    print(constants, "\n")
    cells = predict(arguments.engine, constants)
    print(markdown(cells))
    print(f"\nworst: {max((cell.ratio for cell in cells), key=lambda ratio: abs(math.log(ratio))):.2f}")


if __name__ == "__main__":
    main()
