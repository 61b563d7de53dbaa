"""Packed weights on disk: panels that an earlier process packed are read back instead of being made anew.

One file for a model, a processor, kernels and settings, in `packed` of penstock's home. Its name is a digest of all
that its bytes depend on, and it holds the same in words. It is read into huge pages at the speed of memory: replicas
could share a mapped file, but that lies in small pages, from which every step would read more slowly (see `memory`). A
file that is damaged, or of something else, is as none, and is written again. It gets its name once it is whole; the
least recently used go when all together are too large.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from penstock.core.private_files import is_safe_from_others, make_private, open_private
from penstock.hub.disk import check_room, written_whole
from penstock.hub.home import penstock_home
from penstock.model.ops import Linear
from penstock.model.ops.memory import pages
from penstock.model.ops.native import NativeOps
from penstock.model.ops.panels import NativeLinear, NativeLookup, PackedWeight

log = logging.getLogger("penstock.model")

LIMIT_VARIABLE = "PENSTOCK_PACKED_GIB"  # 0: nothing is kept
_DEFAULT_GIB = 32.0
_MAGIC = b"penstock packed weights 1\n"
_ALIGNMENT = 4096  # of what panels begin at, and of all the data
_READERS = 2
_MIN_BYTES = 8 << 20  # less is packed in no time
_KIND = 10  # how nice the thread is that writes
_SOURCES = Path(__file__).parents[2]  # of penstock


class _Entry(msgspec.Struct, frozen=True):
    """One weight: where its parts lie in the data, and what C is told of it."""

    panels: tuple[int, int]  # first byte, and how many
    arithmetic: int
    precise: bool
    shape: tuple[int, int]
    unit: float
    bias: int | None = None  # first byte of [n] float32
    order: int | None = None  # first byte of [k] int32


class _Header(msgspec.Struct, frozen=True):
    key: str
    num_bytes: int  # of the data, which follows at the next multiple of the alignment
    sums: list[int]  # of the 64-bit words of each reader's piece
    entries: dict[str, _Entry]


_header_decoder = msgspec.json.Decoder(_Header)


class PackedCache:
    """The packed weights of one model by name."""

    def __init__(self, ops: NativeOps, key: str, directory: Path | None = None, *, min_bytes: int = _MIN_BYTES) -> None:
        """`key`: all that the bytes depend on, but for the kernels and penstock's own code. `min_bytes`: of weights,
        for them to be kept."""
        self._min_bytes = min_bytes
        self._ops = ops
        code = code_identity("hub", "model", "quant")
        kernels = Path(ops.library._name).name  # which is a fingerprint, wherever the home is
        self._key = f"{key}\n{kernels}\n{ops.arithmetic} {sorted(ops.keeps)}\n{code}"
        self._directory = directory or penstock_home() / "packed"
        self._path = self._directory / f"{hashlib.sha256(self._key.encode()).hexdigest()[:24]}.bin"
        self._packed: dict[str, PackedWeight] = {}  # all that were asked for
        self._is_whole = False  # the file has all of them
        self._entries: dict[str, _Entry] = {}
        self._data = torch.empty(0, dtype=torch.uint8)
        if found := _read(self._path, self._key):
            self._entries, self._data = found
            self._is_whole = True

    def linear(self, name: str, make: Callable[[], Linear]) -> Linear:
        """The linear layer of this name as it was packed before, or as it is made now."""
        packed = self._find(name)
        if packed is None:
            made = make()
            assert isinstance(made, NativeLinear)
            self._packed[name] = made.weight
            return made
        return NativeLinear(packed)

    def tied(self, name: str, make: Callable[[], tuple[Linear, Linear]]) -> tuple[Linear, Linear]:
        """An embedding and the head that shares its weight."""
        packed = self._find(name)
        if packed is None:
            lookup, head = make()
            assert isinstance(head, NativeLinear)
            self._packed[name] = head.weight
            return lookup, head
        return NativeLookup(packed), NativeLinear(packed)

    def _find(self, name: str) -> PackedWeight | None:
        entry = self._entries.get(name)
        if entry is None:
            self._is_whole = False
            return None
        (start, num_bytes), (n, k) = entry.panels, entry.shape
        bias = None if entry.bias is None else self._data[entry.bias : entry.bias + 4 * n].view(torch.float32)
        order = None if entry.order is None else self._data[entry.order : entry.order + 4 * k].view(torch.int32)
        self._packed[name] = packed = PackedWeight(
            self._ops, entry.arithmetic, torch.Size(entry.shape), bias, self._data[start : start + num_bytes]
        ).describe(precise=entry.precise, order=order, unit=entry.unit)
        return packed

    def save_later(self) -> threading.Thread | None:
        """Write what was packed, in a thread, unless the file has it all or it is little."""
        packed, self._packed = self._packed, {}
        self._data = self._data[:0]  # what is used holds on to it
        if self._is_whole or sum(each.num_bytes for each in packed.values()) < max(1, self._min_bytes):
            return None
        thread = threading.Thread(target=self._save, args=(packed,), name="save-packed", daemon=True)
        thread.start()
        return thread

    def _save(self, packed: dict[str, PackedWeight]) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _KIND)
        try:
            make_private(self._directory)
            with open_private(self._directory / ".lock", "ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for left in self._directory.glob("*.part"):  # by a process that was killed: the lock is ours
                    left.unlink(missing_ok=True)
                entries, parts, num_bytes = _laid_out(packed)
                if not _make_room(self._directory, num_bytes, besides=self._path):
                    return
                check_room(self._directory, num_bytes)
                header = _Header(self._key, num_bytes, _sums(parts, num_bytes), entries)
                encoded = msgspec.json.encode(header)
                with written_whole(self._path) as file:
                    file.write(_MAGIC + len(encoded).to_bytes(8, "little") + encoded)
                    for start, part in parts:
                        file.seek(_data_start(len(encoded)) + start)
                        file.write(part.numpy().data.cast("B"))
                    file.truncate(_data_start(len(encoded)) + num_bytes)
        except BlockingIOError:
            pass  # another process writes; its file or the next one's will do
        except Exception as error:  # a full or read-only disk: nothing depends on this
            log.info("packed weights are not kept: %s", error)


def files_identity(path: Path) -> str:
    """The model's files by name, size and time: a file, or all that a directory has."""
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())
    found = [(each.name, status.st_size, status.st_mtime_ns) for each in files for status in (each.stat(),)]
    return f"{path.resolve()}\n{found}"


def code_identity(*packages: str) -> str:
    """Penstock's code in these packages: what other code made or measured is not to be used."""
    files = (file for part in packages for file in sorted((_SOURCES / part).rglob("*.py")))
    found = [(str(each.relative_to(_SOURCES)), each.stat().st_size, each.stat().st_mtime_ns) for each in files]
    return hashlib.sha256(repr(found).encode()).hexdigest()


def _read(path: Path, key: str) -> tuple[dict[str, _Entry], Tensor] | None:
    try:
        if not is_safe_from_others(path):
            return None
        with path.open("rb") as file:
            head = file.read(len(_MAGIC) + 8)
            size = int.from_bytes(head[len(_MAGIC) :], "little")
            if head[: len(_MAGIC)] != _MAGIC or size > path.stat().st_size:
                raise ValueError("it does not begin as such a file does")
            header = _header_decoder.decode(file.read(size))
            if header.key != key:
                raise ValueError("it is of something else")
            data = pages(header.num_bytes, huge=True)
            start = _data_start(size)

            def read(piece: range) -> int:
                view = data[piece.start : piece.stop].numpy().data
                while view and (count := os.preadv(file.fileno(), [view], start + piece.stop - len(view))):
                    view = view[count:]
                return int(data[piece.start : piece.stop].view(torch.int64).sum())

            with ThreadPoolExecutor(_READERS) as pool:
                if list(pool.map(read, _pieces(header.num_bytes))) != header.sums:
                    raise ValueError("it is damaged")
        os.utime(path)
        return header.entries, data
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        log.warning("packed weights in %s are made anew: %s", path, error)
        return None


def _laid_out(packed: dict[str, PackedWeight]) -> tuple[dict[str, _Entry], list[tuple[int, Tensor]], int]:
    """Entries, parts with their first bytes, and how many bytes it all is."""
    entries: dict[str, _Entry] = {}
    parts: list[tuple[int, Tensor]] = []
    at = 0

    def place(part: Tensor) -> int:
        nonlocal at
        start, at = at, -(-(at + part.nbytes) // _ALIGNMENT) * _ALIGNMENT
        parts.append((start, part))
        return start

    for name, weight in sorted(packed.items()):
        entries[name] = _Entry(
            (place(weight.panels), weight.panels.nbytes),
            weight.arithmetic,
            weight.precise,
            (weight.n, weight.k),
            weight.unit,
            None if weight.bias is None else place(weight.bias),
            None if weight.order is None else place(weight.order),
        )
    return entries, parts, at


def _pieces(num_bytes: int) -> Iterator[range]:
    """One for each reader, of whole words."""
    step = -(-num_bytes // (_READERS * _ALIGNMENT)) * _ALIGNMENT
    return (range(start, min(start + step, num_bytes)) for start in range(0, num_bytes, step))


def _sums(parts: list[tuple[int, Tensor]], num_bytes: int) -> list[int]:
    """Sums as readers will find them, by 64-bit words that wrap; between the parts there are zeros."""
    found = []
    for piece in _pieces(num_bytes):
        total = 0
        for start, part in parts:
            first, last = max(piece.start - start, 0), min(piece.stop - start, part.nbytes)
            if first < last:
                total += _word_sum(part.view(torch.uint8)[first:last])
        found.append((total + (1 << 63)) % (1 << 64) - (1 << 63))
    return found


def _word_sum(part: Tensor) -> int:
    whole = part.nbytes // 8 * 8
    rest = bytes(part[whole:].tolist()).ljust(8, b"\0")
    return int(part[:whole].view(torch.int64).sum()) + int.from_bytes(rest, "little", signed=True)


def _data_start(header_bytes: int) -> int:
    return -(-(len(_MAGIC) + 8 + header_bytes) // _ALIGNMENT) * _ALIGNMENT


def _limit_bytes() -> int:
    return int(float(os.environ.get(LIMIT_VARIABLE, _DEFAULT_GIB)) * (1 << 30))


def _make_room(directory: Path, num_bytes: int, *, besides: Path) -> bool:
    """Whether a file of this size may be kept; for it the least recently used of the others go."""
    limit = _limit_bytes()
    others = sorted((each.stat().st_mtime, each.stat().st_size, each) for each in directory.glob("*.bin"))
    others = [other for other in others if other[2] != besides]
    total = num_bytes + sum(size for _, size, _ in others)
    for _, size, path in others:
        if total <= limit or num_bytes > limit:
            break
        path.unlink(missing_ok=True)
        total -= size
    return num_bytes <= limit
