"""Compiles the C kernels for this machine, once, and keeps the result.

It knows compilers, flags and files; not what the kernels compute. The library is named by everything that went into it,
so a changed source, compiler or processor makes another one. If several processes start together, one builds and the
others wait for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from penstock.core.private_files import DIRECTORY_MODE, is_safe_from_others, make_private
from penstock.hub.disk import locked
from penstock.hub.home import penstock_home

log = logging.getLogger("penstock.model")

SOURCES = Path(__file__).parent / "kernels"
# No -ffast-math and no contraction: a compiler that reorders sums, or fuses a multiply-add here and not there, makes a
# row's result depend on the kernel variant that computed it.
# No second scheduling: it gains nothing on processors that reorder instructions themselves, and GCC 13 searches for
# minutes when it tunes for Sapphire Rapids.
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-pthread", "-fno-math-errno", "-ffp-contract=off", "-fno-schedule-insns2")
TARGETS = (("-march=native",), ("-mcpu=native",), ())  # the first one that the compiler accepts
COMPILE_TIMEOUT_S = 600  # a few seconds of work, on a machine that may have better things to do


class KernelsUnavailable(Exception):
    """There are no native kernels here; the message says why. The caller uses the torch reference instead."""


def build_kernels() -> Path:
    """The shared library for this machine, compiled unless an earlier run left it."""
    compiler = find_compiler()
    library = penstock_home() / "kernels" / f"{_fingerprint(compiler)}.so"
    if library.exists() and not is_safe_from_others(library):
        _close_to_others(library)
    if not library.exists():
        _compile(compiler, library)
    if not is_safe_from_others(library):
        raise KernelsUnavailable(
            f"{library} is not loaded, since another user could have written it: look who owns it and its directory"
        )
    return library


def _close_to_others(library: Path) -> None:
    """Closes a directory of ours that an earlier version left open; nobody can tell who wrote the library: it goes."""
    with contextlib.suppress(OSError):
        library.parent.chmod(DIRECTORY_MODE)
        library.unlink()


def find_compiler() -> list[str]:
    """The command of the C compiler: $CC, the system's, or the one in the `ziglang` package."""
    for command in (shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]):
        if command and (path := shutil.which(command[0])):
            return [path, *command[1:]]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise KernelsUnavailable(
        "no C compiler: neither $CC, cc, gcc nor clang was found; `pip install ziglang` brings one"
    )


def cpu_identity() -> str:
    """The processor's model and feature flags: what -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU part")
    return "\n".join(line for line in lines if line.split(":")[0].strip() in wanted)


def _fingerprint(compiler: list[str]) -> str:
    digest = hashlib.sha256()
    for part in _fingerprint_parts(compiler):
        digest.update(part + b"\0")
    return digest.hexdigest()[:20]


def _fingerprint_parts(compiler: list[str]) -> Iterator[bytes]:
    for source in sorted(SOURCES.iterdir()):
        yield source.name.encode()
        yield source.read_bytes()
    binary = Path(compiler[0]).resolve()
    yield repr((compiler, str(binary), binary.stat().st_size, binary.stat().st_mtime_ns, FLAGS, TARGETS)).encode()
    yield cpu_identity().encode()


def _compile(compiler: list[str], library: Path) -> None:
    try:
        with locked(library.parent.with_suffix(".lock"), on_wait=lambda: None):
            if library.exists():  # built by the process that held the lock before
                return
            log.info("compiling the CPU kernels: once on this machine, up to a minute")
            make_private(library.parent)
            with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
                built = _link(compiler, Path(scratch))
                built.chmod(0o700)
                os.replace(built, library)  # atomic: whoever looks sees no library or a whole one
    except OSError as error:
        raise KernelsUnavailable(f"cannot write {library}: {error}") from error


def _link(compiler: list[str], directory: Path) -> Path:
    target = _accepted_target(compiler, directory)

    def compile_one(source: Path) -> str:
        output = directory / f"{source.stem}.o"
        _run([*compiler, *FLAGS, *target, "-c", str(source), "-o", str(output)])
        return str(output)

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compile_one, sorted(SOURCES.glob("*.c"))))
    library = directory / "kernels.so"
    _run([*compiler, "-shared", "-pthread", *objects, "-o", str(library), "-lm"])
    return library


def _accepted_target(compiler: list[str], directory: Path) -> tuple[str, ...]:
    empty = directory / "empty.c"
    empty.write_text("")
    for target in TARGETS[:-1]:
        try:
            _run([*compiler, *target, "-c", str(empty), "-o", str(directory / "empty.o")])
            return target
        except KernelsUnavailable:
            continue
    return TARGETS[-1]


def _run(command: list[str]) -> None:
    """The reason of a failure is one line; all that the compiler said is logged for `--log-level debug`."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        reason = f"the C compiler took more than {COMPILE_TIMEOUT_S} s for `{shlex.join(command)}`"
        raise KernelsUnavailable(reason) from error
    except OSError as error:
        raise KernelsUnavailable(f"the C compiler {command[0]} did not run: {error}") from error
    if result.returncode != 0:
        log.debug("`%s` failed: %s", shlex.join(command), result.stderr)
        said = result.stderr.strip().splitlines() or [f"it ended with status {result.returncode} and said nothing"]
        error_line = next((line for line in said if "error" in line), said[0])
        raise KernelsUnavailable(f"the C compiler {command[0]} failed: {error_line.strip()}")
