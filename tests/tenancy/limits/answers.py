"""The answers of limiters that may come at once or later."""

from __future__ import annotations

import asyncio

from penstock.tenancy.limits.limiter import Answer, Held
from penstock.tenancy.limits.quota import Refusal


async def answered(answer: Answer | asyncio.Future[Answer]) -> Answer:
    return await answer if isinstance(answer, asyncio.Future) else answer


async def granted(answer: Answer | asyncio.Future[Answer]) -> Held:
    found = await answered(answer)
    assert not isinstance(found, Refusal)
    return found


async def refused(answer: Answer | asyncio.Future[Answer]) -> Refusal:
    found = await answered(answer)
    assert isinstance(found, Refusal)
    return found
