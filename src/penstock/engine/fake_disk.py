"""Fake files for KV blocks of the fake runner, for tests: nothing is done before somebody says so, and any of it can
fail. It is as strict as the runner: a block is read and written when the job is done, not when it is asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from penstock.core.hashing import BlockHash
from penstock.engine.fake import FakeRunner
from penstock.kv.disk import DiskNews, Expired, Fetched, Found, Written

_Content = list[int | None]


class FakeDisk:
    block_bytes = 1

    def __init__(self, runner: FakeRunner, num_blocks: int, marks: dict[int, str] | None = None) -> None:
        """`marks`: of blocks by their ids, the device's first; they go to the disk and back with them."""
        self.num_blocks = num_blocks
        self.num_damaged = 0
        self.num_errors = 0
        self.read_s = 0.001  # that every read takes
        self.files: dict[BlockHash, tuple[BlockHash, int | None, _Content]] = {}
        self._marks = {} if marks is None else marks
        self._file_marks: dict[BlockHash, str] = {}
        self._runner = runner
        self._jobs: deque[Callable[[bool], None]] = deque()
        self._news: list[DiskNews] = []

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    def do_job(self, *, succeeds: bool = True) -> None:
        """The oldest."""
        self._jobs.popleft()(succeeds)

    def do_all(self) -> None:
        while self._jobs:
            self.do_job()

    def expire(self, own: BlockHash) -> None:
        del self.files[own]
        self._news.append(Expired(own))

    def restart(self, runner: FakeRunner) -> FakeDisk:
        """The same files for another engine."""
        other = FakeDisk(runner, self.num_blocks, self._marks)
        other.files, other._file_marks = dict(self.files), dict(self._file_marks)
        other._news = [Found(own, parent, name) for own, (parent, name, _) in self.files.items()]
        return other

    # -- as `BlockFiles`

    def write(self, own: BlockHash, parent: BlockHash, routing_hash: int | None, block: int) -> None:
        def job(succeeds: bool) -> None:
            if succeeds:
                self.files[own] = parent, routing_hash, list(self._runner.host_block(block))
                self._file_marks[own] = self._marks.get(self._runner.num_blocks + block, "")
                assert len(self.files) <= self.num_blocks, "more files than there is room for"
            self._news.append(Written(own, succeeds))

        self._jobs.append(job)

    def fetch(self, own: BlockHash, block: int) -> None:
        def job(succeeds: bool) -> None:
            found = self.files.get(own)
            room = self._runner.host_block(block)
            self._marks[self._runner.num_blocks + block] = self._file_marks.get(own, "")
            room[:] = found[2] if found is not None and succeeds else [None] * len(room)
            if not succeeds:
                self.num_damaged += 1
                self.files.pop(own, None)
            self._news.append(Fetched(own, found is not None and succeeds, self.read_s))

        self._jobs.append(job)

    def remove(self, own: BlockHash) -> None:
        def job(_succeeds: bool) -> None:
            self.files.pop(own, None)

        self._jobs.append(job)

    def news(self) -> list[DiskNews]:
        news, self._news = self._news, []
        return news

    def wait(self, timeout_s: float) -> None:
        """A wait lets the disk work."""
        self.do_all()
