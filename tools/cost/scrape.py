"""`python -m tools.cost.scrape [--streams 1000]`: what a scrape of /metrics costs a replica with so many open streams.

The real server and the engine's real loop over the fake runner. The text is written in a thread; the rest of a
client's wait is its place among a thousand streams, which are read in the same process here.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import aiohttp
from tests.server.replica import NAME, Replica, serving

from penstock.core.settings import ServerSettings


async def _stream(session: aiohttp.ClientSession, url: str, index: int) -> None:
    body = {"model": NAME, "prompt": [10 + index % 90, 11, 12], "max_tokens": 4000, "stream": True, "ignore_eos": True}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        async for _ in response.content:
            pass


async def _measure(replica: Replica, num_streams: int, num_scrapes: int) -> None:
    url = f"http://{replica.host}:{replica.port}"
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        streams = [asyncio.create_task(_stream(session, url, i)) for i in range(num_streams)]
        while replica.engine.num_open < num_streams:  # noqa: ASYNC110 (another thread's)
            await asyncio.sleep(0.1)
        taken, written = [], []
        for _ in range(num_scrapes):
            await asyncio.sleep(0.5)
            started = time.perf_counter()
            async with session.get(f"{url}/metrics") as response:
                size = len(await response.read())
            taken.append(time.perf_counter() - started)
            started = time.perf_counter()
            replica.app._recorder.exposition(is_ready=True, restarts=0, info=replica.engine.info)()
            written.append(time.perf_counter() - started)
        print(
            f"{num_streams} streams: {size:,} bytes are written in {1e3 * min(written):.2f} ms (median "
            f"{1e3 * statistics.median(written):.2f}); a client waits {1e3 * statistics.median(taken):.1f} ms"
        )
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.cost.scrape")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--scrapes", type=int, default=8)
    arguments = parser.parse_args()
    settings = ServerSettings(max_open=arguments.streams + 8)
    options = {"step_s": 0.02, "num_blocks": 1 << 20, "max_num_seqs": arguments.streams}
    with serving(settings, **options) as replica:
        asyncio.run(_measure(replica, arguments.streams, arguments.scrapes))


if __name__ == "__main__":
    main()
