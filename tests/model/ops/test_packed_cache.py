"""Packed weights that are kept on disk: read back bit for bit, or made anew."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.model.ops import Linear
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.native import NativeOps
from penstock.model.ops.packed_cache import PackedCache, files_identity
from penstock.model.quantized.grouped import GroupedWeight

ROWS, COLUMNS = 48, 64
NAMES = ("floats", "low bits", "with a bias")


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    try:
        return NativeOps("bfloat16", threads=1, keeps=frozenset({4, 8}))
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))


def low_bit() -> GroupedWeight:
    values = torch.randint(256, (ROWS, COLUMNS // 2), dtype=torch.uint8)
    scales, minimums = torch.rand(2, ROWS, COLUMNS // 32)
    return GroupedWeight(values, 4, scales, minimums=minimums, order=torch.randperm(COLUMNS))


def nobody() -> Linear:
    raise AssertionError("it was packed before")


def make_all(cache: PackedCache, ops: NativeOps) -> list[Linear]:
    torch.manual_seed(0)
    weight, bias, table = torch.randn(ROWS, COLUMNS), torch.randn(ROWS - 1), torch.randn(ROWS, COLUMNS)
    made = [
        cache.linear(NAMES[0], lambda: ops.linear(weight)),
        cache.linear(NAMES[1], lambda: ops.linear(low_bit())),
        cache.linear(NAMES[2], lambda: ops.linear(weight[1:], bias, precise=False)),
    ]
    return [*made, cache.tied("table", lambda: ops.tied(table))[1]]


def saved(directory: Path, ops: NativeOps, key: str = "key") -> tuple[Path, list[Tensor]]:
    """The file that a first process leaves, and what its linears make of some rows."""
    before = set(directory.glob("*.bin"))
    cache = PackedCache(ops, key, directory, min_bytes=0)
    linears = make_all(cache, ops)
    thread = cache.save_later()
    assert thread is not None
    thread.join()
    (path,) = set(directory.glob("*.bin")) - before
    return path, results(linears)


def results(linears: list[Linear]) -> list[Tensor]:
    x = torch.linspace(-1, 1, 3 * COLUMNS).view(3, COLUMNS)
    return [linear(x) for linear in linears]


def found_again(directory: Path, ops: NativeOps, key: str = "key") -> list[Linear]:
    cache = PackedCache(ops, key, directory, min_bytes=0)
    linears = [*(cache.linear(name, nobody) for name in NAMES), cache.tied("table", lambda: (nobody(), nobody()))[1]]
    assert cache.save_later() is None
    return linears


def test_weights_are_read_back_bit_for_bit_and_packed_once(tmp_path: Path, ops: NativeOps) -> None:
    _, before = saved(tmp_path, ops)
    for one, other in zip(results(found_again(tmp_path, ops)), before, strict=True):
        assert torch.equal(one, other)


def test_embedding_that_is_tied_to_the_head_is_read_back(tmp_path: Path, ops: NativeOps) -> None:
    saved(tmp_path, ops)
    lookup, head = PackedCache(ops, "key", tmp_path).tied("table", lambda: (nobody(), nobody()))
    torch.manual_seed(0)
    torch.randn(ROWS, COLUMNS), torch.randn(ROWS - 1)
    wanted, _ = ops.tied(torch.randn(ROWS, COLUMNS))
    ids = torch.tensor([0, 5, ROWS - 1])
    assert torch.equal(lookup(ids), wanted(ids))
    assert head is not None


@pytest.mark.parametrize("damage", ["a byte", "its end", "its beginning", "all of it"])
def test_damaged_file_is_made_anew(
    tmp_path: Path, ops: NativeOps, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, before = saved(tmp_path, ops)
    data = bytearray(path.read_bytes())
    if damage == "a byte":
        data[-5000] ^= 1
    elif damage == "its end":
        del data[-5000:]
    else:
        data[: 10 if damage == "its beginning" else len(data)] = b""
    path.write_bytes(data)
    cache = PackedCache(ops, "key", tmp_path, min_bytes=0)
    assert "are made anew" in caplog.text
    for one, other in zip(results(make_all(cache, ops)), before, strict=True):
        assert torch.equal(one, other)
    thread = cache.save_later()
    assert thread is not None
    thread.join()
    found_again(tmp_path, ops)


def test_file_of_something_else_is_not_used(tmp_path: Path, ops: NativeOps, caplog: pytest.LogCaptureFixture) -> None:
    path, _ = saved(tmp_path, ops)
    other, _ = saved(tmp_path, ops, "another key")
    other.write_bytes(path.read_bytes())
    with pytest.raises(AssertionError, match="packed before"):
        found_again(tmp_path, ops, "another key")
    assert "it is of something else" in caplog.text


def test_weight_that_the_file_lacks_is_added(tmp_path: Path, ops: NativeOps) -> None:
    saved(tmp_path, ops)
    cache = PackedCache(ops, "key", tmp_path, min_bytes=0)
    make_all(cache, ops)
    cache.linear("new", lambda: ops.linear(torch.ones(ROWS, COLUMNS)))
    thread = cache.save_later()
    assert thread is not None
    thread.join()
    PackedCache(ops, "key", tmp_path).linear("new", nobody)
    found_again(tmp_path, ops)


def test_least_recently_used_file_goes_when_all_are_too_large(
    tmp_path: Path, ops: NativeOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, _), (second, _) = saved(tmp_path, ops, "first"), saved(tmp_path, ops, "second")
    monkeypatch.setenv("PENSTOCK_PACKED_GIB", str(2.5 * first.stat().st_size / 2**30))
    os.utime(second, (1, 1))
    third, _ = saved(tmp_path, ops, "third")
    assert set(tmp_path.glob("*.bin")) == {first, third}


@pytest.mark.parametrize("limit", ["0", "0.000001"])
def test_nothing_is_kept_that_is_larger_than_the_limit(
    tmp_path: Path, ops: NativeOps, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setenv("PENSTOCK_PACKED_GIB", limit)
    cache = PackedCache(ops, "key", tmp_path, min_bytes=0)
    make_all(cache, ops)
    thread = cache.save_later()
    assert thread is not None
    thread.join()
    assert not list(tmp_path.glob("*.bin"))


def test_small_models_are_not_kept(tmp_path: Path, ops: NativeOps) -> None:
    cache = PackedCache(ops, "key", tmp_path)
    make_all(cache, ops)
    assert cache.save_later() is None


def test_one_process_writes_at_a_time_and_what_a_killed_one_left_goes(tmp_path: Path, ops: NativeOps) -> None:
    left = tmp_path / "killed.bin.part"
    left.write_bytes(b"half")
    with (tmp_path / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cache = PackedCache(ops, "key", tmp_path, min_bytes=0)
        make_all(cache, ops)
        thread = cache.save_later()
        assert thread is not None
        thread.join()
    assert {path.name for path in tmp_path.iterdir()} == {left.name, ".lock"}
    saved(tmp_path, ops)
    assert not left.exists()


def test_identity_of_a_model_changes_with_each_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = files_identity(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    after = files_identity(tmp_path)
    os.utime(tmp_path / "model.safetensors", (1, 1))
    assert len({before, after, files_identity(tmp_path), files_identity(tmp_path / "config.json")}) == 4
