"""One gateway process as the limiter sees it: clients of one tenant that always want more. The tests start several.

It prints a line for each event; `broken` means that a client came back at the told time and was refused.
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
from penstock.tenancy.limits.quota import Quota, Rate, Reason, Refusal

QUANTUM_S = 0.1
QUOTA = Quota(tokens=Rate(60_000, burst_s=2.0), concurrency=64)
TENANT = "acme"


async def client(limiter: Limiter, name: int, until: float, ids: itertools.count[int]) -> None:
    rng = random.Random(name)
    while monotonic() < until:
        id, tokens, told = next(ids), rng.randint(5, 40), False
        while monotonic() < until:
            asked = monotonic()
            answer = limiter.reserve(TENANT, QUOTA, tokens, caller=name)
            if isinstance(answer, asyncio.Future):
                answer = await answer
            answered = monotonic()
            if not isinstance(answer, Refusal):
                say("admitted", asked, answered, name, id, tokens)
                await asyncio.sleep(rng.uniform(0.001, 0.1))
                used = rng.randint(tokens // 4, tokens)
                limiter.settle(answer, used)
                say("ended", name, id, used)
                break
            say("refused", answered, answer.reason, answer.retry_after_s)
            if told and not answer.is_due and answer.reason is not Reason.UNAVAILABLE:
                say("broken", asked)
            told = answer.reason is not Reason.UNAVAILABLE
            if (back_at := monotonic() + (answer.retry_after_s or 0)) > until:
                return
            await asyncio.sleep(back_at - monotonic())


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

        shared = SharedLimiter(Path(where), retry_quantum_s=QUANTUM_S)
        await shared.start()
        say("host" if shared.is_host else "guest")
        await hammer(shared, seconds, first, clients)
        await shared.close()
    else:
        from penstock.tenancy.limits.redis import RedisLimiter

        across = RedisLimiter(where, on_loss="closed", retry_quantum_s=QUANTUM_S)
        await across.start()
        await hammer(across, seconds, first, clients)
        await across.close()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])))
