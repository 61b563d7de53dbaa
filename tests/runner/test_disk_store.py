"""A directory of KV blocks: bounds, restarts, neighbours, and everything that goes wrong with disks."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.kv.disk import DiskNews, Expired, Fetched, Found, Written
from penstock.runner import block_file
from penstock.runner.block_file import HEADER_BYTES, BlockName
from penstock.runner.disk_store import DiskLimits, DiskStore
from tests.waiting import eventually

LAYOUT, OTHER_LAYOUT = b"L" * 16, b"M" * 16
BLOCK = 256
ROOT = b"r" * 16


class Memory:
    def __init__(self, block_bytes: int = BLOCK) -> None:
        self.blocks = [bytearray(block_bytes) for _ in range(2)]

    def parts(self, block: int) -> list[memoryview]:
        return [memoryview(self.blocks[block])]

    def wait_saved(self) -> None:
        pass


@dataclass
class Clock:
    now: float = 1_000_000_000.0

    def __call__(self) -> float:
        return self.now


def own(number: int) -> bytes:
    return number.to_bytes(16, "little")


def content(number: int, num_bytes: int = BLOCK) -> bytes:
    return blake2b(own(number), digest_size=64).digest() * (num_bytes // 64)


class Bench:
    def __init__(
        self,
        path: Path,
        max_blocks: float = 8,
        *,
        layout: bytes = LAYOUT,
        max_age_s: float = 1e9,
        clock: Callable[[], float] = time.time,
        block_bytes: int = BLOCK,
    ) -> None:
        self.memory = Memory(block_bytes)
        self.block_bytes = block_bytes
        limits = DiskLimits(int(max_blocks * (HEADER_BYTES + block_bytes)), max_age_s)
        self.store = DiskStore(path, layout, self.memory, limits, clock)
        self.store.wait_ready(60.0)
        self.heard: list[DiskNews] = []

    def wait_for(self, kind: type[DiskNews], name: bytes) -> DiskNews:
        def look() -> list[DiskNews]:
            self.heard += self.store.news()
            return [news for news in self.heard if isinstance(news, kind) and news.own == name]

        found = eventually(look)[-1]
        self.heard.remove(found)
        return found

    def write(self, number: int) -> bool:
        self.memory.blocks[0][:] = content(number, self.block_bytes)
        self.store.write(own(number), ROOT, number, 0)
        news = self.wait_for(Written, own(number))
        assert isinstance(news, Written)
        return news.is_kept

    def read(self, number: int) -> bool:
        self.memory.blocks[1][:] = bytes(self.block_bytes)
        self.store.fetch(own(number), 1)
        news = self.wait_for(Fetched, own(number))
        assert isinstance(news, Fetched)
        if news.is_whole:
            assert self.memory.blocks[1] == content(number, self.block_bytes)
        return news.is_whole

    def found(self) -> list[int]:
        self.heard += self.store.news()
        return [int.from_bytes(news.own, "little") for news in self.heard if isinstance(news, Found)]


@contextlib.contextmanager
def bench(path: Path, *args: object, **options: object) -> Iterator[Bench]:
    made = Bench(path, *args, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.store.close()


def files(path: Path) -> list[Path]:
    return sorted(path.glob("*/*.kv*"))


def test_blocks_are_found_after_a_restart_and_are_their_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "kv"
    with bench(path) as first:
        assert all(first.write(number) for number in (1, 2, 3))
        assert first.read(2)
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    for file in (*files(path), *path.glob("*/.lock")):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    with bench(path) as second:
        assert sorted(second.found()) == [1, 2, 3]
        assert all(second.read(number) for number in (1, 2, 3))
        second.store.remove(own(1))
        assert second.write(4)
        assert not second.read(1)
        assert second.store.num_damaged == second.store.num_errors == 0


def test_the_bound_holds_also_when_it_is_smaller_after_a_restart(tmp_path: Path) -> None:
    with bench(tmp_path) as first:
        assert all(first.write(number) for number in range(8))
        assert not first.write(8)  # who wants room removes something first
        first.store.remove(own(0))
        assert first.write(8)
        assert len(files(tmp_path)) == 8
    for age, number in enumerate(range(8, 0, -1)):
        os.utime(next(tmp_path.glob(f"*/{own(number).hex()}-*")), (1e9 - age, 1e9 - age))
    with bench(tmp_path, 3.5) as second:
        assert second.found() == [6, 7, 8]
        assert len(files(tmp_path)) == 3
    with pytest.raises(ConfigError, match="no room for one block") as refused:
        Bench(tmp_path, 0.9)
    assert refused.value.param == "disk_kv_gib"


def test_what_is_too_old_goes_at_the_start_and_while_the_engine_runs(tmp_path: Path) -> None:
    clock = Clock()
    with bench(tmp_path, max_age_s=100.0, clock=clock) as first:
        assert first.write(1)
        clock.now += 60
        assert first.write(2)
        clock.now += 60
        assert first.write(3)
        first.wait_for(Expired, own(1))
        assert not first.read(1)
        assert first.read(2)
        assert len(files(tmp_path)) == 2
    for number, age_s in ((2, 90), (3, 110)):
        os.utime(next(tmp_path.glob(f"*/{own(number).hex()}-*")), (clock.now - age_s,) * 2)
    with bench(tmp_path, max_age_s=100.0, clock=clock) as second:
        assert second.found() == [2]
        assert len(files(tmp_path)) == 1
    os.utime(files(tmp_path)[0], (clock.now + 1e6,) * 2)  # from the future: its age will never be known
    with bench(tmp_path, max_age_s=100.0, clock=clock) as third:
        assert third.found() == []
        assert files(tmp_path) == []


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "swap", "open"])
def test_a_damaged_file_is_never_used_and_removed(tmp_path: Path, damage: str) -> None:
    with bench(tmp_path) as made:
        assert made.write(1)
        assert made.write(2)
        path, other = (next(tmp_path.glob(f"*/{own(number).hex()}-*")) for number in (1, 2))
        whole = path.read_bytes()
        match damage:
            case "flip":
                path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
            case "cut":
                path.write_bytes(whole[:-1])
            case "empty":
                path.write_bytes(b"")
            case "swap":
                path.write_bytes(other.read_bytes())
            case "open":
                path.chmod(0o666)
        assert not made.read(1)
        assert made.store.num_damaged == 1
        assert made.read(2)
        eventually(lambda: path.exists(), lambda exists: not exists)
        assert made.write(1)  # and another takes its place
        assert made.read(1)


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    with bench(tmp_path) as first:
        assert first.write(1)
    (directory,) = tmp_path.iterdir()
    (directory / (BlockName(own(2), ROOT, 2).file_name + ".part")).write_bytes(b"half")
    (directory / BlockName(own(3), ROOT, 3).file_name).write_bytes(b"torn by a power cut")
    (directory / "note.txt").write_text("an operator's")
    with bench(tmp_path) as second:
        assert second.found() == [1]
        assert sorted(path.name for path in directory.iterdir()) == [
            ".lock",
            BlockName(own(1), ROOT, 1).file_name,
            "note.txt",
        ]


def test_two_engines_have_a_directory_each_and_both_find_theirs_again(tmp_path: Path) -> None:
    with bench(tmp_path) as one, bench(tmp_path) as other:
        assert one.store.directory != other.store.directory
        assert one.write(1)
        assert other.write(2)
        assert not other.read(1)
    with bench(tmp_path) as one, bench(tmp_path) as other:
        assert sorted([*one.found(), *other.found()]) == [1, 2]


def test_files_of_other_models_are_not_used_and_give_way(tmp_path: Path) -> None:
    with bench(tmp_path, layout=OTHER_LAYOUT) as old:
        assert all(old.write(number) for number in range(4))
    with bench(tmp_path, 6) as new:
        assert new.found() == []
        assert all(new.write(number) for number in range(2))
        assert len(files(tmp_path)) == 6
        assert all(new.write(number) for number in range(2, 6))
        assert len(files(tmp_path)) == 6
        assert len({path.parent for path in files(tmp_path)}) == 1
        assert [path.name for path in tmp_path.iterdir()] == [f"{LAYOUT.hex()}-0"]


def test_files_that_another_engine_uses_are_left_alone(tmp_path: Path) -> None:
    with bench(tmp_path, layout=OTHER_LAYOUT) as old:
        assert all(old.write(number) for number in range(4))
        with bench(tmp_path, 4) as new:
            assert all(new.write(number) for number in range(4))
        assert all(old.read(number) for number in range(4))


def test_a_full_disk_is_said_once_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    with bench(tmp_path, clock=clock) as made:
        assert made.write(1)

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(block_file.os, "write", full)
            assert not made.write(2)
            assert not made.write(3)  # it is not even tried for a while
            assert made.store.num_errors == 1
            clock.now += 60
            assert not made.write(2)
            assert made.store.num_errors == 2
        clock.now += 60
        assert made.write(2)
        assert made.read(1)
        assert made.read(2)
    assert len([record for record in caplog.records if "No space left" in record.getMessage()]) == 1


def test_a_directory_that_cannot_be_used_is_said_once_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with bench(path / "kv") as made:
        assert not made.write(1)
        assert not made.read(1)
        assert made.store.num_errors == 1
        assert made.store.directory is None
    assert len([record for record in caplog.records if "no KV blocks are kept on disk" in record.getMessage()]) == 1


def test_a_directory_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    directory = tmp_path / f"{LAYOUT.hex()}-0"
    directory.mkdir()
    directory.chmod(0o777)
    with bench(tmp_path) as made:
        assert not made.write(1)
        assert made.store.num_errors == 1


WRITER = """
import sys
from pathlib import Path
from tests.runner.test_disk_store import Bench
bench = Bench(Path(sys.argv[1]), 16, block_bytes=1 << 20)
print("ready", flush=True)
number = int(sys.argv[2])
while True:
    if number >= int(sys.argv[2]) + 16:
        bench.store.remove((number - 16).to_bytes(16, "little"))
    assert bench.write(number)
    number += 1
    print(number, flush=True)
"""


@pytest.mark.slow
def test_kill_9_at_any_moment_leaves_no_block_that_is_wrong_and_no_more_than_the_bound(tmp_path: Path) -> None:
    for turn in range(6):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(1000 * turn)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        for _ in range(3 + 11 * turn):
            assert writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        assert len(files(tmp_path)) <= 17  # and one that was being written
        with bench(tmp_path, 16, block_bytes=1 << 20) as after:
            found = after.found()
            assert len(found) == len(files(tmp_path)) <= 16
            assert found
            assert all(after.read(number) for number in found)
            assert after.store.num_damaged == 0
            for number in found:
                after.store.remove(own(number))
