"""Run pip and show how far it is on one line: `python tools/pip_progress.py LOG install -r requirements.lock`.

Its whole output goes to LOG and is shown if it fails. Where standard output is no terminal there is a line every few
seconds in place of one that changes. Standard library only: nothing is installed yet.
"""

from __future__ import annotations

import queue
import re
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import TextIO

PAUSE_S = 10.0  # between two lines, where no line can change
DOWNLOADING = re.compile(r"Downloading (?:\S*/)?([A-Za-z0-9_.]+?)-\d\S* ?(\([\d.]+ [kMG]?B\))?")
COLLECTING = re.compile(r"Collecting ([A-Za-z0-9_.\-]+)|Processing (?:\S*/)?([A-Za-z0-9_.]+?)-\d")


class Progress:
    def __init__(self, total: int, *, changes: bool) -> None:
        self._total = total
        self._changes = changes
        self._began_s = self._told_s = time.monotonic()
        self._seen: set[str] = set()
        self._doing = "starting pip"

    def take(self, line: str) -> None:
        if found := COLLECTING.match(line):
            self._doing = found[1] or found[2]
            self._seen.add(self._doing)
        elif found := DOWNLOADING.search(line):
            self._doing = f"downloading {found[1]} {found[2] or ''}".rstrip()
        elif line.startswith("Installing collected packages"):
            self._doing = "unpacking"
        self.tell()

    def tell(self) -> None:
        now_s = time.monotonic()
        if self._changes:
            print(f"\r\033[K{self._line(now_s)}", end="", flush=True)
        elif now_s - self._told_s >= PAUSE_S:
            self._told_s = now_s
            print(self._line(now_s), flush=True)

    def end(self) -> None:
        if self._changes:
            print("\r\033[K", end="", flush=True)

    def _line(self, now_s: float) -> str:
        of = f" of {self._total}" if self._total else ""
        return f"  {now_s - self._began_s:4.0f} s  {len(self._seen)}{of} packages: {self._doing}"


def num_packages(arguments: list[str]) -> int:
    """Those that requirement files name."""
    files = [Path(value) for flag, value in pairwise(arguments) if flag == "-r"]
    return sum(bool(re.match(r"[A-Za-z0-9]", line)) for file in files for line in file.read_text().splitlines())


def pass_on(output: TextIO, lines: queue.Queue[str]) -> None:
    for line in output:
        lines.put(line)
    lines.put("")


def main() -> int:
    log, *arguments = sys.argv[1:]
    command = [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check", "--progress-bar", "off"]
    progress = Progress(num_packages(arguments), changes=sys.stdout.isatty())
    with (
        Path(log).open("w") as kept,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as pip,
    ):
        assert pip.stdout is not None
        lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=pass_on, args=(pip.stdout, lines), daemon=True).start()
        while True:
            try:
                line = lines.get(timeout=1.0)
            except queue.Empty:  # it unpacks something large
                progress.tell()
                continue
            if not line:
                break
            kept.write(line)
            progress.take(line.strip())
    progress.end()
    if pip.returncode:
        print(Path(log).read_text(), file=sys.stderr)
    return pip.returncode


if __name__ == "__main__":
    sys.exit(main())
