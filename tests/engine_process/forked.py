"""A program that processes of tests run: it writes what it finds to a descriptor, and does what it is told."""

from __future__ import annotations

import json
import os
import signal
import sys


def main() -> None:
    descriptor, what = int(sys.argv[1]), sys.argv[2]
    found = {
        "pid": os.getpid(),
        "argv": sys.argv[1:],
        "session": os.getsid(0),
        "directory": os.getcwd(),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": sorted(map(int, os.listdir("/proc/self/fd"))),
        "variable": os.environ.get("PENSTOCK_TEST_VARIABLE"),
        "has_fractions": "fractions" in sys.modules,
    }
    os.write(descriptor, json.dumps(found).encode() + b"\n")
    if what == "wait":
        signal.pause()
    sys.exit(int(what))


if __name__ == "__main__":
    main()
