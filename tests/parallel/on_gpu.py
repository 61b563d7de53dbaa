"""One layout of ranks on one GPU, in a process of its own: `python -m tests.parallel.on_gpu soak|FAMILY LAYOUT`.

Torch's symmetric memory knows a group of ranks by its name for as long as the process lives, so a process leads one
engine.
"""

from __future__ import annotations

import faulthandler
import sys
from dataclasses import replace

from tests.model.family_configs import CONFIGS
from tests.parallel.test_layouts import NUM_BLOCKS, served
from tests.runner.test_cuda_soak import on_gpu, soaked

LIMIT_S = 100


def main() -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)  # a hang says where
    what, layout = sys.argv[1:]
    if what == "soak":
        soaked(replace(on_gpu(16), device=f"cuda {layout}", seconds=4.0))
    else:
        served(CONFIGS[what], f"cuda {layout}", num_blocks=NUM_BLOCKS)


if __name__ == "__main__":
    main()
