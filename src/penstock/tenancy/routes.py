"""Traffic shares of the versions of a model, as changed while gateways run: kept, followed, rolled back.

A gateway's file says which versions there are and what share each begins with; it declares that here, so that a change
can be checked wherever it is made. A change is a revision, and none is ever lost: what is in force is the file with the
last revision over it, and to roll back is to say an earlier one again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from penstock.core.config import nearest
from penstock.core.converter import Converter
from penstock.core.errors import Conflict, InvalidValue, ModelNotFound
from penstock.observe.background import count_error
from penstock.tenancy.database import Database, Execute
from penstock.tenancy.revisions import next_revision

Weights = dict[str, Annotated[float, Meta(ge=0, le=1e6)]]
Shadows = dict[str, Annotated[float, Meta(ge=0, le=1)]]

WHOLE = 100.0  # the weight of a version that has all
FILE = 0  # the revision of what the file says


class Declared(Struct, frozen=True):
    """One route as the file of the gateway that started last has it; weights and shadows by version."""

    name: str
    weights: Weights
    shadow: Shadows
    slo: dict[str, float | None] = field(default_factory=dict)  # the model's `core.slo.Slo`
    has_copies: bool = True  # requests can be copied to its versions; those for pipelines cannot


_declared_decoder = msgspec.json.Decoder(Declared)


class RouteRevision(Struct, frozen=True, omit_defaults=True):
    """A route's differences from the file, by version."""

    name: str
    revision: int = FILE
    weights: Weights = field(default_factory=dict)
    shadow: Shadows = field(default_factory=dict)
    action: str = ""  # in a word: weights, promote v2, rollback to 17
    by: str = ""  # an admin's name
    at: float = 0.0  # seconds since 1970
    restores: int | None = None  # the revision that this one says again


_route_revision_decoder = msgspec.json.Decoder(RouteRevision)


class SharesAsked(Struct, forbid_unknown_fields=True):
    """A change of shares, as in a merge patch: what is not named stays, None is what the file says."""

    weights: dict[str, Annotated[float, Meta(ge=0, le=1e6)] | None] = field(default_factory=dict)
    shadow: dict[str, Annotated[float, Meta(ge=0, le=1)] | None] = field(default_factory=dict)


_shares_asked_converter = Converter(SharesAsked)


def shares_asked(values: Mapping[str, Any]) -> SharesAsked:
    try:
        return _shares_asked_converter.convert(values)
    except msgspec.ValidationError as error:
        raise InvalidValue(str(error)) from None


class RouteInForce(Struct, frozen=True):
    declared: Declared
    last: RouteRevision

    @property
    def weights(self) -> Weights:
        return {version: self.last.weights.get(version, weight) for version, weight in self.declared.weights.items()}

    @property
    def shadow(self) -> Shadows:
        return {version: self.last.shadow.get(version, share) for version, share in self.declared.shadow.items()}


class RouteBook:
    """The store's part of it. Blocks: for commands and for threads of their own."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    def declare(self, routes: Iterable[Declared]) -> None:
        """Stores the routes of a gateway's file. Others that other gateways declared stay."""
        if not (found := list(routes)):
            return
        with self._database.writing() as execute:
            for route in found:
                execute(
                    "INSERT INTO routes (name, document) VALUES (?, ?) "
                    "ON CONFLICT (name) DO UPDATE SET document = excluded.document",
                    (route.name, msgspec.json.encode(route).decode()),
                )

    def add_versions(self, routes: Iterable[Declared]) -> list[Declared]:
        """Versions that no file names, found by their pools. What is declared already stays as it is, and what is new
        to a route that has others gets no traffic. Returns these routes as they are declared from now on."""
        if not (new := list(routes)):
            return []
        found = []
        with self._database.writing() as execute:
            for route in new:
                rows = execute("SELECT document FROM routes WHERE name = ?", (route.name,))
                known = _declared_decoder.decode(rows[0][0]) if rows else route
                none = dict.fromkeys(route.weights, 0.0)
                merged = replace(known, weights=none | known.weights, shadow=none | known.shadow)
                if not rows or merged != known:
                    execute(
                        "INSERT INTO routes (name, document) VALUES (?, ?) "
                        "ON CONFLICT (name) DO UPDATE SET document = excluded.document",
                        (route.name, msgspec.json.encode(merged).decode()),
                    )
                found.append(merged)
        return found

    def all(self) -> list[RouteInForce]:
        with self._database.reading() as execute:
            names = [name for (name,) in execute("SELECT name FROM routes ORDER BY name")]
            return [_in_force(execute, name) for name in names]

    def show(self, name: str) -> RouteInForce:
        with self._database.reading() as execute:
            return _in_force(execute, name)

    def history(self, name: str) -> list[RouteRevision]:
        """The newest first."""
        with self._database.reading() as execute:
            _in_force(execute, name)
            return _history(execute, name)

    def change(self, name: str, asked: SharesAsked, *, by: str = "") -> RouteInForce:
        with self._database.writing() as execute:
            return self.change_within(execute, name, asked, by=by)

    def change_within(
        self, execute: Execute, name: str, asked: SharesAsked, *, action: str = "weights", by: str = ""
    ) -> RouteInForce:
        """The same in a transaction of somebody else's."""
        revision = next_revision(self._database, execute)
        now = _in_force(execute, name)
        for part in (asked.weights, asked.shadow):
            refuse_unknown(now.declared, part)
        if not now.declared.has_copies and any(asked.shadow.values()):
            said = f"'{name}' has versions that are pipelines, and requests for pipelines are not copied"
            raise InvalidValue(said, param="shadow")
        weights, shadow = _merged(now.last.weights, asked.weights), _merged(now.last.shadow, asked.shadow)
        return self._write(execute, now, RouteRevision(name, revision, weights, shadow, action, by))

    def show_within(self, execute: Execute, name: str) -> RouteInForce:
        return _in_force(execute, name)

    def promote(self, name: str, version: str, *, by: str = "") -> RouteInForce:
        """All traffic to one version. Copies go on being sent to whoever was sent some."""
        with self._database.writing() as execute:
            revision = next_revision(self._database, execute)
            now = _in_force(execute, name)
            refuse_unknown(now.declared, {version: WHOLE})
            weights = {other: WHOLE if other == version else 0.0 for other in now.declared.weights}
            promoted = RouteRevision(name, revision, weights, now.last.shadow, f"promote {version}", by)
            return self._write(execute, now, promoted)

    def roll_back(self, name: str, to: int | None = None, *, by: str = "") -> RouteInForce:
        """Goes back to the revision before the one in force, each time further back; or to this one; 0: the file."""
        with self._database.writing() as execute:
            return self.roll_back_within(execute, name, to, by=by)

    def roll_back_within(self, execute: Execute, name: str, to: int | None, *, by: str = "") -> RouteInForce:
        """The same in a transaction of somebody else's."""
        revision = next_revision(self._database, execute)
        now = _in_force(execute, name)
        known = {one.revision: one for one in _history(execute, name)} | {FILE: RouteRevision(name)}
        said = now.last.revision if now.last.restores is None else now.last.restores
        if to is None:
            if said == FILE:
                raise Conflict(f"'{name}' is as the file has it: there is nothing before that")
            to = max(one for one in known if one < said)
        if to not in known:
            raise InvalidValue(f"'{name}' has no revision {to}", param="to")
        origin = to if known[to].restores is None else known[to].restores
        action = "rollback to the file" if origin == FILE else f"rollback to {origin}"
        again = replace(known[to], revision=revision, action=action, by=by, restores=origin)
        return self._write(execute, now, again)

    def _write(self, execute: Execute, now: RouteInForce, last: RouteRevision) -> RouteInForce:
        last = replace(last, at=self._clock())
        found = RouteInForce(now.declared, last)
        if not any(found.weights.values()):
            raise InvalidValue(f"no version of '{last.name}' would have a weight", param="weights")
        execute(
            "INSERT INTO route_revisions (revision, name, document) VALUES (?, ?, ?)",
            (last.revision, last.name, msgspec.json.encode(last).decode()),
        )
        return found


def routes_changed(execute: Execute, since: int) -> tuple[RouteRevision, ...]:
    """The last revision of every route that changed after revision `since`. Of one that cannot be read the shares stay
    as they are."""
    rows = execute(
        "SELECT document FROM route_revisions WHERE revision IN "
        "(SELECT MAX(revision) FROM route_revisions GROUP BY name HAVING MAX(revision) > ?)",
        (since,),
    )
    found = []
    for (document,) in rows:
        try:
            found.append(_route_revision_decoder.decode(document))
        except (ValueError, TypeError) as error:
            count_error("store reader", error)
    return tuple(found)


def _in_force(execute: Execute, name: str) -> RouteInForce:
    if not (rows := execute("SELECT document FROM routes WHERE name = ?", (name,))):
        names = [found for (found,) in execute("SELECT name FROM routes")]
        hint = nearest(name, names)
        raise ModelNotFound(f"no model '{name}' with versions" + (f"; did you mean '{hint}'?" if hint else ""))
    last = execute("SELECT document FROM route_revisions WHERE name = ? ORDER BY revision DESC LIMIT 1", (name,))
    revision = _route_revision_decoder.decode(last[0][0]) if last else RouteRevision(name)
    return RouteInForce(_declared_decoder.decode(rows[0][0]), revision)


def _history(execute: Execute, name: str) -> list[RouteRevision]:
    rows = execute("SELECT document FROM route_revisions WHERE name = ? ORDER BY revision DESC", (name,))
    return [_route_revision_decoder.decode(document) for (document,) in rows]


def _merged(old: Mapping[str, float], new: Mapping[str, float | None]) -> dict[str, float]:
    return {version: share for version, share in {**old, **new}.items() if share is not None}


def refuse_unknown(declared: Declared, named: Mapping[str, float | None]) -> None:
    for version in named:
        if version not in declared.weights:
            hint = nearest(version, declared.weights)
            known = f"did you mean '{hint}'?" if hint else f"it has {', '.join(declared.weights)}"
            raise InvalidValue(f"'{declared.name}' has no version '{version}'; {known}", param=version)
