"""One of two ranks on one GPU that sum by symmetric memory and by NCCL: `python -m tests.runner.sums_on_gpu RANK PORT`.

NCCL refuses two ranks on one GPU, unless they seem to be on two hosts (NCCL_HOSTID) that reach each other by sockets.
"""

from __future__ import annotations

import faulthandler
import os
import sys

import torch
from torch._C._distributed_c10d import TCPStore

from penstock.model.shard import Shard
from penstock.runner.ranks.by_size import SumsBySize
from penstock.runner.ranks.gloo import DistributedRanks
from penstock.runner.ranks.symmetric_memory import SymmetricMemoryRanks, meet

LIMIT_S, SIZE, BEYOND = 100, 2, 1 << 20
SHAPES = [(1, 4096), (127, 4096), (128, 4096), (129, 4096), (2048, 4096), (7, 333)]  # bf16: the third is 1 MiB


def main() -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)  # a hang says where
    rank, port = map(int, sys.argv[1:])
    os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store = TCPStore("127.0.0.1", port, None, is_master=rank == 0, wait_for_workers=False)
    shard = Shard(rank, SIZE)
    small = SymmetricMemoryRanks(shard, device, meet(store, rank, SIZE, SIZE))
    large = DistributedRanks(shard, device, store, host="127.0.0.1", timeout_s=60.0)
    ranks = SumsBySize(small, large, beyond_bytes=BEYOND)
    for turn in range(3):  # one way behind the other, in every order
        for shape in SHAPES[turn:] + SHAPES[:turn]:
            for dtype in (torch.bfloat16, torch.float32):
                _check(ranks, shape, dtype)
    _check_graph(ranks, device)
    torch.cuda.synchronize()
    store.set(f"done-{rank}", "")
    store.wait([f"done-{other}" for other in range(SIZE)])  # the first has the store
    print("sums agree")


def _part(rank: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator).to("cuda", dtype)


def _check(ranks: SumsBySize, shape: tuple[int, int], dtype: torch.dtype) -> None:
    own, other = (_part(rank, shape, dtype) for rank in (ranks.shard.rank, 1 - ranks.shard.rank))
    wanted = (own.float() + other.float()).to(dtype)
    assert torch.equal(ranks.sum(own), wanted), (shape, dtype)


def _check_graph(ranks: SumsBySize, device: torch.device) -> None:
    """A small sum inside a CUDA graph, with large ones between its replays."""
    x = torch.empty(4, 4096, dtype=torch.bfloat16, device=device)
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        ranks.sum(x)
    torch.cuda.current_stream().wait_stream(warm)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ranks.sum(x)
    for turn in range(4):
        x.fill_(turn + ranks.shard.rank)
        graph.replay()
        assert torch.equal(out, torch.full_like(out, 2 * turn + 1))
        _check(ranks, (2048, 4096), torch.bfloat16)


if __name__ == "__main__":
    main()
