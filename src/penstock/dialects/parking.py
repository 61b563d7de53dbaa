"""Parking and waking a replica, whatever engine it is: which requests say it, and what their answers mean.

A penstock replica drains by itself. Others abort what runs or fail when they are told while they are busy, so they are
asked first how busy they are, and after waking for a token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from penstock.api.parking import PARK_PATH, WAKE_PATH, ParkReport, ParkRequest
from penstock.core.errors import Conflict, EngineUnavailable, PenstockError, UnsupportedTask
from penstock.dialects.detect import detect, paths
from penstock.dialects.dialect import Dialect, Signal
from penstock.dialects.engines.openai import PENSTOCK
from penstock.dialects.liveness import Answer
from penstock.dialects.reading import read

Ask = Callable[[str, str, bytes | None], Awaitable[Answer]]  # method, path, and a body in JSON

UNKNOWN_PATH = (404, 405, 501)
_park_report_decoder = msgspec.json.Decoder(ParkReport)


class _Card(msgspec.Struct):
    id: str


class _Cards(msgspec.Struct):
    data: list[_Card]


_cards_decoder = msgspec.json.Decoder(_Cards)


class _Error(msgspec.Struct, frozen=True):
    message: str = ""


class _Refusal(msgspec.Struct):
    error: _Error = _Error()


_refusal_decoder = msgspec.json.Decoder(_Refusal)


async def park(ask: Ask, dialect: Dialect | None = None, *, wait_s: float = 30.0) -> ParkReport:
    """Make a replica give its device's memory back. `dialect`: None: it is found out; `wait_s`: how long a penstock
    replica may wait for its open requests. Raises `Conflict` where some are open, and what else stands in the way.

    Of other engines nothing must be sent there meanwhile: drain them at their gateways before.
    """
    dialect = dialect or await detected(ask)
    if dialect is PENSTOCK:
        return _reported(await ask("POST", PARK_PATH, msgspec.json.encode(ParkRequest(wait_s))))
    await _check_idle(ask, dialect)
    await _call(ask, dialect, _paths(dialect)[0])
    return ParkReport("parked")


async def wake(ask: Ask, dialect: Dialect | None = None) -> ParkReport:
    """Make it take the memory again, and make a token."""
    dialect = dialect or await detected(ask)
    if dialect is PENSTOCK:
        return _reported(await ask("POST", WAKE_PATH, b"{}"))
    await _call(ask, dialect, _paths(dialect)[1])
    await make_token(ask, dialect)
    return ParkReport("ready")


async def can_park(ask: Ask, dialect: Dialect) -> bool:
    """Whether it knows the paths, as far as it tells: of some engines only a call shows it."""
    if dialect.parking is None or dialect.parking.shows is None:
        return dialect.parking is not None
    return (await ask("GET", dialect.parking.shows, None)).status == 200


async def detected(ask: Ask) -> Dialect:
    return detect({path: await ask("GET", path, None) for path in paths("") if "{model}" not in path})


def _paths(dialect: Dialect) -> tuple[str, str]:
    if dialect.parking is None:
        raise UnsupportedTask(f"a server of the dialect {dialect.name} cannot be parked")
    return dialect.parking.park, dialect.parking.wake


async def _check_idle(ask: Ask, dialect: Dialect) -> None:
    """Raises Conflict where the first document that tells the load tells of some. An unknown load is no obstacle."""
    for document in dialect.loads if dialect.parking is not None else ():
        answer = await ask("GET", document.path.decode(), None)
        values = read(document, answer.body) if answer.status == 200 else {}
        if Signal.RUNNING in values:
            num_open = int(values[Signal.RUNNING] + values.get(Signal.WAITING, 0.0))
            if num_open:
                raise Conflict(f"it is not parked: {num_open} requests are still open")
            return


async def _call(ask: Ask, dialect: Dialect, path: str) -> None:
    answer = await ask("POST", path, b"{}")
    if answer.status in UNKNOWN_PATH:
        assert dialect.parking is not None
        raise UnsupportedTask(f"it does not know {path.partition('?')[0]}: start it with {dialect.parking.needs}")
    _check(answer)


async def make_token(ask: Ask, dialect: Dialect) -> None:
    if dialect.health.deep is not None:
        _check(await ask("GET", dialect.health.deep.decode(), None))
        return
    try:
        cards = _cards_decoder.decode((await ask("GET", "/v1/models", None)).body).data
    except msgspec.DecodeError:
        cards = []
    if not cards:
        raise EngineUnavailable("it is awake, but names no model that could be asked for a token")
    wanted = {"model": cards[0].id, "prompt": "1", "max_tokens": 1}
    _check(await ask("POST", "/v1/completions", msgspec.json.encode(wanted)))


def _reported(answer: Answer) -> ParkReport:
    _check(answer)
    return _park_report_decoder.decode(answer.body)


def _check(answer: Answer) -> None:
    if answer.status < 300:
        return
    try:
        told = _refusal_decoder.decode(answer.body).error.message
    except (msgspec.DecodeError, UnicodeDecodeError):
        told = ""
    kind: type[PenstockError] = Conflict if answer.status == 409 else EngineUnavailable
    raise kind(told or f"it answered with status {answer.status}")
