"""Fetching and starting a model that lies at a URL: cold, cached on disk, and cached in memory.

    python -m tools.source_speed MODEL.gguf --rounds 3 --connection-mb-s 60

The file is served by a web server on this machine, which gives each connection so many MB/s, as stores do. Cold: the
weights cache is empty; cached: the files are on the disk and not in the page cache; page-cached: in memory too. Kernels
are compiled in all three.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median

import uvloop
from tools.cold_start import start

from penstock.cli.replicas import _reserved_ports, _write_config
from penstock.core.settings import EngineSettings, Settings
from penstock.hub.home import models_directory

CHUNK_BYTES = 1 << 18


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a .gguf file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connection-mb-s", type=float, default=60.0)
    arguments = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(arguments.model, arguments.connection_mb_s * 1e6))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as home:
        os.environ["PENSTOCK_HOME"] = home
        spec = f"http://127.0.0.1:{server.server_port}/{arguments.model.name}"
        show_fetches(spec, arguments.model.stat().st_size, arguments.rounds)
        uvloop.run(show_starts(spec, arguments.rounds))


def handler(path: Path, bytes_per_s: float) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            size = path.stat().st_size
            asked = self.headers.get("range")
            first, last = map(int, asked.removeprefix("bytes=").split("-")) if asked else (0, size - 1)
            self.send_response(206 if asked else 200)
            self.send_header("etag", '"1"')
            self.send_header("content-length", str(last + 1 - first))
            self.send_header("content-range", f"bytes {first}-{last}/{size}")
            self.end_headers()
            began_s, sent = time.monotonic(), 0
            with path.open("rb") as file:
                while sent < last + 1 - first:
                    sent += os.sendfile(
                        self.connection.fileno(), file.fileno(), first + sent, min(CHUNK_BYTES, last + 1 - first - sent)
                    )
                    time.sleep(max(0.0, began_s + sent / bytes_per_s - time.monotonic()))

        def log_message(self, *arguments: object) -> None: ...

    return Handler


def show_fetches(spec: str, num_bytes: int, rounds: int) -> None:
    from penstock.hub.progress import silent
    from penstock.hub.remote import parts
    from penstock.hub.sources import pull

    print("| connections | fetched and verified, s: best (median) | MB/s |\n|---|---|---|")
    all_connections = parts.CONNECTIONS
    for connections in (1, all_connections):
        parts.CONNECTIONS, found = connections, []
        for _ in range(rounds):
            forget_models()
            began_s = time.monotonic()
            pull(spec, progress=silent)
            found.append(time.monotonic() - began_s)
        print(f"| {connections} | {min(found):.2f} ({median(found):.2f}) | {num_bytes / min(found) / 1e6:.0f} |")


async def show_starts(spec: str, rounds: int) -> None:
    here = str(Path(__file__).parents[1] / "src")
    kinds: dict[str, Callable[[], None]] = {"cold": forget_all, "cached": drop_pages, "page-cached": lambda: None}
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    settings = Settings(model=spec, engine=EngineSettings())
    with _reserved_ports(1) as (port,), tempfile.TemporaryDirectory() as directory:
        config = _write_config(settings, "measured", port, settings.server.role, 1, Path(directory))
        for turn in range(rounds + 1):
            for kind, prepare in kinds.items():
                prepare()
                measured = await start(config, port, here, None)
                if turn:  # the first compiles kernels
                    found[kind].append(measured.ready_s)
    print("\n| start | ready, s: best (median) |\n|---|---|")
    for kind, times in found.items():
        print(f"| {kind} | {min(times):.2f} ({median(times):.2f}) |")


def forget_models() -> None:
    shutil.rmtree(models_directory(), ignore_errors=True)


def forget_all() -> None:
    """Everything that was made of the model; kernels are of the machine."""
    for path in models_directory().parent.iterdir():
        if path.name != "kernels":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def drop_pages() -> None:
    for path in models_directory().parent.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


if __name__ == "__main__":
    main()
