"""With blocks that come back from disk, also after a restart, every answer is what it is without, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.model.loading import random_model
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.native import NativeOps
from penstock.runner.disk_store import DiskLimits, DiskStore
from penstock.sched.plan import StepPlan
from tests.equality.inprocess import InProcess
from tests.equality.test_host_tier import requests
from tests.equality.test_invariance import CONFIG


class OnDisk(InProcess):
    """An engine with host memory for a few blocks, and a disk; nobody is so impatient as to compute what is read."""

    def __init__(self, path: Path, ops: NativeOps) -> None:
        super().__init__(random_model(CONFIG, ops), ops, num_blocks=20, max_num_seqs=3, host_blocks=24)
        host = self._runner._mover._host
        assert host is not None
        self.store = DiskStore(path, b"L" * 16, host, DiskLimits(1 << 30, 1e9))
        self.store.wait_ready(60.0)
        self.cache.keep_on_disk(self.store)
        assert self.cache.disk is not None
        self.disk = self.cache.disk

    def step(self) -> StepPlan | None:
        while self.disk.is_reading:
            self.store.wait(60.0)
            self.cache.poll(float(self._steps))
        return super().step()

    def end(self) -> None:
        while self.disk.is_writing:
            self.store.wait(60.0)
            self.cache.poll(float(self._steps))
        self.store.close()


def test_answers_are_the_same_to_the_bit_from_disk_and_after_a_restart(tmp_path: Path) -> None:
    try:
        ops = NativeOps("float32", threads=1)
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
    plain = InProcess(random_model(CONFIG, ops), ops, num_blocks=200, share_prefixes=False)
    plain.run(*requests())
    num_loaded = []
    for _ in range(2):
        engine = OnDisk(tmp_path, ops)
        engine.run(*requests())
        engine.end()
        num_loaded.append(engine.disk.counters.loaded_blocks)
        assert engine.store.num_damaged == engine.store.num_errors == 0
        for request in requests():
            assert engine.outputs[request.id] == plain.outputs[request.id]
            for own, known in zip(engine.logits[request.id], plain.logits[request.id], strict=True):
                assert torch.equal(own, known)
    assert all(num_loaded)
    assert any(engine.cached[f"r0-{number}"] for number in range(4))  # what only the engine before has computed
