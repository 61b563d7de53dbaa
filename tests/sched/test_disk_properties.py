"""The scheduler's promises with blocks on disk: prompts that come again and again, more of them than memory holds, and
a disk that is slow, fails and forgets."""

from __future__ import annotations

import random

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import initialize, rule

from penstock.core.request import Request
from penstock.engine.fake import FakeRunner
from penstock.kv.cache import KVCache
from penstock.sched.scheduler import Scheduler
from tests.examples import examples
from tests.sched.test_properties import BLOCK, MAX_SEQS, SEEDS, VOCAB, Client, SchedulerMachine

PROMPTS = [[first] * (4 * BLOCK + first) for first in range(1, 9)]


class DiskMachine(SchedulerMachine):
    @initialize(
        num_blocks=st.integers(12, 16),
        overlaps=st.booleans(),
        host_blocks=st.sampled_from([6, 10, 16]),
        disk_blocks=st.sampled_from([5, 80]),
    )
    def start(self, num_blocks: int, overlaps: bool, host_blocks: int, disk_blocks: int) -> None:
        super().start(num_blocks, overlaps, host_blocks, disk_blocks)

    @rule(seed=SEEDS)
    def submit(self, seed: int) -> None:
        dice = random.Random(seed)
        self.count += 1
        prompt = list(dice.choice(PROMPTS)) + [0] * dice.randint(0, 6)
        request = Request(f"r{self.count}", prompt, dice.randint(1, 6), namespace=dice.choice(["", "", "", "other"]))
        self.open[request.id] = Client(request)
        self.scheduler.submit(request, self.now)

    @rule()
    def restart(self) -> None:
        """The process is killed: memory is gone, what the disk has not done is never done, and its files are there."""
        assert self.disk is not None
        host = self.cache.pool.host
        assert host is not None
        self.runner = FakeRunner(
            self.runner.num_blocks, BLOCK, vocab_size=VOCAB, overlaps=self.runner.overlaps, host_blocks=host.num_blocks
        )
        self.cache = KVCache(self.runner.num_blocks, BLOCK, host_blocks=host.num_blocks)
        self.disk = self.disk.restart(self.runner)
        self.cache.keep_on_disk(self.disk)
        self.scheduler = Scheduler(self.cache, self.budget, max_num_seqs=MAX_SEQS, aging_s=1.0)
        self.in_flight = None
        self.open.clear()


TestDisk = DiskMachine.TestCase
TestDisk.settings = settings(max_examples=examples(30), stateful_step_count=20)
