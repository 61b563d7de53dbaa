"""Times of a collective by the bytes that each rank brings, measured once on the devices that make it.

Kernels of GPUs meet inside CUDA graphs, where nobody can read a clock between two of them. So the time of a step's
collectives is estimated: each is counted with what one of its size took when nothing else ran. Waits for a rank that
comes late are not in it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SIZES = tuple(1 << power for power in range(10, 25, 2))  # 1 KiB to 16 MiB
_TIMES = 8


@dataclass(frozen=True)
class CollectiveTimes:
    sizes: tuple[int, ...] = ()  # in bytes, ascending; none: nothing was measured
    seconds: tuple[float, ...] = ()

    def of(self, num_bytes: int) -> float:
        """Seconds for `num_bytes`: between two sizes by their line, beyond the largest in proportion to it."""
        sizes, seconds = self.sizes, self.seconds
        if not sizes or num_bytes == 0:
            return 0.0
        place = bisect_left(sizes, num_bytes)
        if place == 0:
            return seconds[0]
        if place == len(sizes):
            return seconds[-1] * num_bytes / sizes[-1]
        share = (num_bytes - sizes[place - 1]) / (sizes[place] - sizes[place - 1])
        return seconds[place - 1] + share * (seconds[place] - seconds[place - 1])


def measure(run: Callable[[Tensor], object], device: torch.device, sizes: Sequence[int]) -> CollectiveTimes:
    """`run`: the collective, of a tensor [1, numbers]. All ranks call this at once."""
    found = []
    for size in sizes:
        x = torch.zeros(1, size // 2, dtype=torch.bfloat16, device=device)
        run(x)  # others may have come later
        started, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        started.record()
        for _ in range(_TIMES):
            run(x)
        done.record()
        done.synchronize()
        found.append(started.elapsed_time(done) / 1e3 / _TIMES)
    return CollectiveTimes(tuple(sizes), tuple(found))
