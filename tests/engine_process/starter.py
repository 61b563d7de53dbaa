"""A process that starts another by a template, tells of both, and waits to be killed."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from pathlib import Path

from penstock.engine_process.spawn import TemplateProcess, spawn


async def start(template: TemplateProcess | None) -> None:
    assert template is not None
    process = await spawn("tests.engine_process.forked", ["1", "wait"])
    other = await spawn("tests.engine_process.forked", ["1", "wait"], outlives=True)
    told = {"template": template.pid, "process": process.pid, "outliving": other.pid}
    os.write(1, json.dumps(told).encode() + b"\n")  # at once: the others write there too
    await process.wait()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory, TemplateProcess.start([], Path(directory)) as template:
        asyncio.run(start(template))
