"""One layout of ranks on one GPU, in a process of its own: `python -m tests.parallel.on_gpu WHAT LAYOUT`. WHAT is soak,
beside, a family, or "rebalance FAMILY": experts move while tokens are made, in captured graphs too.

Torch's symmetric memory knows a group of ranks by its name for as long as the process lives, so a process leads one
engine.
"""

from __future__ import annotations

import faulthandler
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.model.family_configs import CONFIGS, SHAPE
from tests.parallel.beside_steps import make_adapters, same_vectors_and_scores, take_turns
from tests.parallel.test_expert_ranks import rebalanced
from tests.parallel.test_layouts import NUM_BLOCKS, served
from tests.runner.devices import assembled
from tests.runner.test_cuda_soak import on_gpu, soaked

LIMIT_S = 240  # beside others


def main() -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)  # a hang says where
    what, layout = sys.argv[1:]
    if what == "soak":
        soak = on_gpu(16)
        sp = int(layout.partition("sp=")[2] or 1)  # a block has as many parts of 16 tokens
        soaked(replace(soak, device=f"cuda {layout}", num_blocks=soak.num_blocks // sp, seconds=4.0))
    elif what == "beside":
        beside_steps(layout)
    elif what.startswith("rebalance "):
        rebalanced(what.removeprefix("rebalance "), f"cuda {layout}", block_size=16)
    else:
        served(CONFIGS[what], f"cuda {layout}", num_blocks=NUM_BLOCKS)


def beside_steps(layout: str) -> None:
    """Adapters and texts: tokens of the reference, vectors and scores of one rank on the CPU."""
    ours = assembled(SHAPE, f"cuda {layout}", block_size=16, max_num_seqs=6, chunk_tokens=16, max_loras=1)
    with TemporaryDirectory() as directory:
        take_turns(ours, make_adapters(Path(directory)))
    same_vectors_and_scores(ours, assembled(SHAPE, "cpu", block_size=4, max_num_seqs=6, chunk_tokens=16))
    meter = ours.rank_runner.meter
    print(f"{meter.num_steps} steps, {meter.busy_s:.3f} s, of which communication {meter.communication_s}")
    assert meter.num_steps > 0
    assert meter.busy_s > 0
    if "tp=" in layout:
        assert meter.communication_s is not None
        assert meter.communication_s > 0
    else:
        assert meter.communication_s is None  # streams between stages are not in the estimate


if __name__ == "__main__":
    main()
