"""One gateway process as the limiter sees it: clients of one tenant that always want more. The tests start several.

They do not wait as told, so that whoever admits too much is found at once. It prints a line for each event.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
from pathlib import Path
from time import monotonic

import uvloop

from penstock.tenancy.limits.limiter import Limiter
from penstock.tenancy.limits.quota import Quota, Rate, Refusal

QUOTA = Quota(tokens=Rate(4000), concurrency=64)
TENANT = "acme"


async def client(limiter: Limiter, name: int, until: float, ids: itertools.count[int]) -> None:
    rng = random.Random(name)
    while monotonic() < until:
        id, tokens = next(ids), rng.randint(5, 40)
        asked = monotonic()
        answer = limiter.reserve(TENANT, QUOTA, tokens, caller=name)
        if isinstance(answer, asyncio.Future):
            answer = await answer
        if isinstance(answer, Refusal):
            say("refused", asked, answer.reason)
            await asyncio.sleep(rng.uniform(0.01, 0.2))
            continue
        say("admitted", asked, monotonic(), name, id, tokens)
        await asyncio.sleep(rng.uniform(0.001, 0.1))
        used = rng.randint(tokens // 4, tokens)
        limiter.settle(answer, used)
        say("ended", name, id, used)


def say(*words: object) -> None:
    print(*words, flush=True)


async def hammer(limiter: Limiter, seconds: float, first: int, clients: int) -> None:
    until = monotonic() + seconds
    say("from", monotonic(), "until", until)
    ids = itertools.count()
    await asyncio.gather(*(client(limiter, first + n, until, ids) for n in range(clients)))


async def main(kind: str, where: str, seconds: float, first: int, clients: int) -> None:
    if kind == "shared":
        from penstock.tenancy.limits.shared import SharedLimiter

        shared = SharedLimiter(Path(where))
        await shared.start()
        say("host" if shared.is_host else "guest")
        await hammer(shared, seconds, first, clients)
        await shared.close()
    else:
        from penstock.tenancy.limits.redis import RedisLimiter

        across = RedisLimiter(where, on_loss="closed")
        await across.start()
        await hammer(across, seconds, first, clients)
        await across.close()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])))
