"""Blocks of a few numbers on a GPU, in memory that can be exported, for the contract of movers."""

from __future__ import annotations

import torch

from penstock.runner.cuda_driver import CudaDriver
from penstock.runner.cuda_kv_memory import DeviceMemory
from penstock.runner.virtual_memory import VirtualMemory
from tests.transfer.fakes import layout_of


class CudaMemory(DeviceMemory):
    """Numbers of eight bytes, half of a block's in each of two parts; -1: nothing was written there."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        device = torch.device("cuda", 0)
        self.virtual = VirtualMemory(CudaDriver(device), lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
        self._shape = (1, 2, num_blocks, block_size // 2)
        super().__init__(self.virtual.zeros(self._shape, dtype=torch.int64, device=device), layout_of(block_size))
        self.pool.fill_(-1)
        torch.cuda.synchronize()

    def fill(self, plus: int = 0) -> None:
        _, _, num_blocks, half = self._shape
        for block_id in range(num_blocks):
            own = [1000 * (block_id + 1) + i + plus for i in range(2 * half)]
            self.pool[0, :, block_id] = torch.tensor(own, device=self.device).view(2, half)
        torch.cuda.synchronize()

    def content(self, block_id: int) -> list[int]:
        return [int(each) for each in self.pool[0, :, block_id].flatten().tolist()]
